"""Generation by several processes, each with a part of the model and of the cache.

    engine (this process)  --batch-->  all ranks   (models.serving.generation.rank)
                           <--logits-- the first rank of the last stage

The parts follow a plan of `models.pretrain.plan`: with `tp` every rank has some heads, and so this share of the cache; with
`pp` some layers. The ranks are forked from a process that has imported what they need. When one has died or does not
answer, all are ended and started again with an empty cache; the engine then computes its sequences again from their
tokens, which only the engine keeps.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import socket
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_client.processes.channel import Closed, Frame, encode_frame, receive_frame, send_frames
from edge_client.processes.fork_server import ForkServer
from edge_client.processes.process import Launch
from models.pretrain import plan_rules
from models.pretrain.parallelize import sizes_of
from models.pretrain.plan import ParallelPlan, PlanError
from models.serving.generation.batch import Batch
from models.serving.generation.batch_frames import to_frame
from models.serving.generation.engine import CacheLost
from models.serving.generation.support import CannotGenerate
from models.zoo.spec import ModelSpec

_RANK = "models.serving.generation.rank"
SPLITTING = ("tp", "pp", "split")
"""Keys of plans that apply to generation."""
MOST_LOSSES = 3
"""Groups that may be lost one after the other without an answer in between."""


class GroupFailed(RuntimeError):
    """The ranks cannot be started, or died again and again."""


@dataclass(frozen=True)
class Parallel:
    """How to start ranks: the `executor` of an engine.

    Attributes:
        description: of the model, as job files have it (`Spec.described`).
        params: its file of params, which every rank reads.
        block_tokens: as in the engine's options.
        seconds: after which a rank that does not answer a batch counts as dead.
        start_seconds: in which the ranks must have started.
    """

    description: Mapping[str, Any]
    params: Path
    plan: ParallelPlan
    block_tokens: int = 16
    seconds: float = 120.0
    start_seconds: float = 300.0
    launch: Launch = dataclasses.field(default_factory=Launch)

    def __call__(self, blocks: int) -> Ranks:
        return Ranks(self, blocks)


def require_plan(plan: ParallelPlan, spec: ModelSpec) -> None:
    """Checks that the model can generate by this plan.

    Raises:
        PlanError: with every reason.
    """
    default = ParallelPlan()
    others = [
        f"{field.name}={getattr(plan, field.name)} does not apply to generation, only {', '.join(SPLITTING)} do"
        for field in dataclasses.fields(plan)
        if field.name not in SPLITTING and getattr(plan, field.name) != getattr(default, field.name)
    ]
    problems = others or plan_rules.problems(plan, sizes_of(spec), batch_size=plan.num_microbatches)
    if problems:
        raise PlanError(f"plan {plan}: " + "; ".join(problems))


class Saved:
    """Contents of blocks that the ranks keep under a key, as long as this object lives."""

    def __init__(self, key: int) -> None:
        self.key = key


class Ranks:
    """The running ranks of a group. An `Executor`.

    Attributes:
        pids: of the ranks, in order.

    Raises:
        CannotGenerate: the ranks cannot open the model.
        GroupFailed: they cannot be started.
    """

    together = False

    def __init__(self, parallel: Parallel, blocks: int) -> None:
        self._parallel, self._blocks = parallel, blocks
        self.pids: list[int] = []
        self._channels: list[socket.socket] = []
        self._meeting: tempfile.TemporaryDirectory[str] | None = None
        self._server = ForkServer(_RANK, launch=parallel.launch)
        self._keys, self._dropped = 0, list[int]()
        self._losses = 0
        try:
            self._start()
        except Closed as error:
            self.close()
            raise GroupFailed(f"ranks of plan {parallel.plan} ended while they started: {error}") from None

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [outputs, V].

        Raises:
            CacheLost: a rank has died or did not answer; all begin again with the next batch.
            GroupFailed: this happened again and again.
        """
        values, blobs = to_frame(batch)
        try:
            if not self._channels:
                self._start()
            dropped, self._dropped[:] = list(self._dropped), []
            self._send({"kind": "run", "dropped": dropped, **values}, blobs)
            answer = self._answer(self._reporter, self._parallel.seconds)
        except Closed as error:
            self._end()
            self._losses += 1
            if self._losses > MOST_LOSSES:
                raise GroupFailed(
                    f"ranks of plan {self._parallel.plan} ended {self._losses} times: {error}"
                ) from None
            raise CacheLost(str(error)) from None
        self._losses = 0
        logits = np.frombuffer(bytearray(answer.blobs[0]), np.float32)
        return torch.from_numpy(logits.reshape(answer.values["shape"]))

    def read(self, blocks: list[int]) -> Saved:
        """Has every rank keep a copy of what the blocks hold."""
        self._keys += 1
        saved = Saved(self._keys)
        weakref.finalize(saved, self._dropped.append, saved.key)
        with suppress(Closed):  # noticed with the next batch
            self._send({"kind": "save", "key": saved.key, "held": blocks})
        return saved

    def write(self, blocks: list[int], contents: Saved) -> None:
        """Has every rank put what it keeps into as many blocks."""
        with suppress(Closed):
            self._send({"kind": "restore", "key": contents.key, "held": blocks})

    def measure(self) -> list[int]:
        """Bytes of keys and values on each rank.

        Raises:
            Closed: a rank has died.
        """
        self._send({"kind": "measure"})
        seconds = self._parallel.seconds
        return [self._answer(rank, seconds).values["cache_bytes"] for rank in range(len(self._channels))]

    def close(self) -> None:
        """Ends all processes."""
        self._end()
        self._server.close()

    @property
    def _reporter(self) -> int:
        """The first rank of the last stage, which has the logits."""
        return (self._parallel.plan.pp - 1) * self._parallel.plan.tp

    def _start(self) -> None:
        """Starts the ranks and waits until each has its part of the model. Closed if one ends before."""
        for _ in range(self._parallel.plan.processes):
            try:
                pid, channel = self._server.fork()
            except OSError:
                raise GroupFailed(f"ranks of plan {self._parallel.plan} cannot be started") from None
            self.pids.append(pid)
            self._channels.append(channel)
        # kept as long as the ranks: gloo may connect two of them only when they first exchange something
        self._meeting = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank, channel in enumerate(self._channels):
            settings = {
                "rank": rank,
                "plan": str(self._parallel.plan),
                "model": dict(self._parallel.description),
                "params": str(self._parallel.params.absolute()),
                "blocks": self._blocks,
                "block_tokens": self._parallel.block_tokens,
                "store": str(Path(self._meeting.name) / "store"),
                "seconds": self._parallel.seconds,
            }
            send_frames(channel, [encode_frame(settings)])
        seconds = self._parallel.start_seconds
        for rank in range(len(self._channels)):
            answer = self._answer(rank, seconds).values
            if "error" in answer:  # then this rank ends, so no other is waited for
                self.close()
                raise CannotGenerate(answer["error"])

    def _send(self, values: dict[str, Any], blobs: list[bytes] | None = None) -> None:
        frame = encode_frame(values, blobs or [])
        for channel in self._channels:
            send_frames(channel, [frame])

    def _answer(self, rank: int, seconds: float) -> Frame:
        """The next frame of a rank. Closed if any rank ends before, or takes too long."""
        deadline = time.monotonic() + seconds
        waited = self._channels[rank]
        while True:
            ready, _, _ = select.select(self._channels, [], [], max(0.0, deadline - time.monotonic()))
            if waited in ready:
                return receive_frame(waited)
            if not ready:
                raise Closed(f"rank {rank} did not answer for {seconds:g} s")
            for other in ready:
                if _has_ended(other):
                    raise Closed(f"rank {self._channels.index(other)} has ended")
            time.sleep(0.001)  # another rank has answered already

    def _end(self) -> None:
        """Ends all ranks."""
        for channel in self._channels:
            channel.close()
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._server.reap(pid)
        self.pids, self._channels = [], []
        if self._meeting is not None:
            self._meeting.cleanup()


def _has_ended(channel: socket.socket) -> bool:
    """Whether the other end of a channel that is ready to be read has closed it."""
    try:
        return not channel.recv(1, socket.MSG_PEEK)
    except OSError:
        return True
