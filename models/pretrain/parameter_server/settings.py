"""The `server` table of a job file: numbers of processes, and the rule by which gradients become an update.

    "server": {"workers": 4, "servers": 2, "mode": "k-of-n", "keep": 3, "replicas": 2}

No torch here: the launching process reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.options import bounded

Mode = Literal["sync", "async", "ssp", "k-of-n"]


@dataclass(frozen=True)
class Servers:
    """Processes and rule. Workers have the first ranks; servers follow, all replicas of one shard together.

    Attributes:
        servers: number of shards the params are split into.
        mode: an update takes a gradient of every worker (sync), or of any one (async), where workers too far ahead wait
            (ssp, Ho 2013), or the first `keep` of a step, and later ones are dropped (k-of-n, Chen 2016).
        staleness: with ssp, how many steps a worker may be ahead of the slowest.
        keep: with k-of-n, k.
        replicas: of every server, itself included; all of them have an update before a worker receives it.
        timeout: seconds without an answer after which a server counts as dead. A worker waits for slower ones, so it
            must exceed the longest step. A killed server is noticed at once.
    """

    workers: int = bounded(2, 1, 1024)
    servers: int = bounded(1, 1, 256)
    mode: Mode = "sync"
    staleness: int = bounded(0, 0, 1_000_000)
    keep: int = bounded(0, 0, 1024)
    replicas: int = bounded(1, 1, 8)
    timeout: float = bounded(600.0, 1.0, 86_400.0)

    @property
    def processes(self) -> int:
        return self.workers + self.servers * self.replicas

    @property
    def needed(self) -> int:
        """Number of gradients in an update."""
        return {"sync": self.workers, "k-of-n": self.keep}.get(self.mode, 1)

    def problems(self, batch_size: int, clip_norm: float) -> list[str]:
        """Why these settings cannot train with such options, one sentence each."""
        k_of_n = self.mode == "k-of-n"
        reasons = {
            f"keep is {self.keep}, expected 1 to {self.workers}, the workers, with mode k-of-n": k_of_n
            and not 1 <= self.keep <= self.workers,
            "keep goes with mode k-of-n": self.keep and not k_of_n,
            "staleness goes with mode ssp": self.staleness and self.mode != "ssp",
            "options.clip_norm needs one server: with several, none sees the whole gradient": clip_norm
            and self.servers > 1,
            f"a batch of {batch_size} rows cannot be shared by {self.workers} workers": batch_size
            < self.workers,
        }
        return [reason for reason, applies in reasons.items() if applies]

    def place(self, rank: int) -> tuple[int, int]:
        """Shard and replica of the server at `rank`, which is `workers` or more."""
        return divmod(rank - self.workers, self.replicas)

    def name(self, rank: int) -> str:
        """Name of a process, for RPC and for people."""
        if rank < self.workers:
            return f"worker{rank}"
        shard, replica = self.place(rank)
        return f"server{shard}-{replica}"

    def replicas_of(self, shard: int) -> list[str]:
        """Names of the servers that keep a shard; the first is the primary until it dies."""
        first = self.workers + shard * self.replicas
        return [self.name(rank) for rank in range(first, first + self.replicas)]

    def __str__(self) -> str:
        text = f"workers={self.workers},servers={self.servers},mode={self.mode}"
        extra = {"ssp": f",staleness={self.staleness}", "k-of-n": f",keep={self.keep}"}.get(self.mode, "")
        return text + extra + (f",replicas={self.replicas}" if self.replicas > 1 else "")
