"""Which gradients make an update, and which workers wait: no transport, no torch.

A worker's clock is the number of the global batch it computes, from 0. A rule is offered contributions, says which
make the `next` update, is told what was `made`, here or at a replica, and with which clock a worker `goes_on`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from models.pretrain.server.settings import Servers


@dataclass(frozen=True)
class Contribution:
    """One worker's part of an update.

    Attributes:
        version: updates in the params it was computed with, of the shard it is for.
        loss: mean over its share of the batch, scaled so that the mean over workers is that of the batch.
        gradients: of the shard's params, scaled alike; left out where only who contributed matters.
    """

    worker: int
    clock: int
    version: int
    loss: float
    gradients: Any = ()


class Rule(Protocol):
    """What a server goes by."""

    dropped: int
    """Contributions that came too late."""

    def offer(self, contribution: Contribution) -> None:
        """Takes it up, unless it is late, or was made already and its worker has not heard."""

    def next(self) -> list[Contribution]:
        """The contributions of an update to make now; none: not yet."""

    def made(self, contributions: list[Contribution]) -> None:
        """An update was made of these."""

    def goes_on(self, worker: int) -> int | None:
        """The clock with which the worker goes on; None: it waits."""

    def lead(self, worker: int) -> int:
        """By how many steps it is ahead of the slowest."""

    def finished(self, steps: int) -> bool:
        """Whether all updates of `steps` global batches were made."""


def of(servers: Servers) -> Rule:
    if servers.mode in ("sync", "k-of-n"):
        return Together(servers.workers, servers.needed)
    return AsTheyCome(servers.workers, servers.staleness if servers.mode == "ssp" else None)


class Together:
    """The first `needed` contributions of a clock make an update; later ones are dropped (Chen 2016, Algorithm 3).

    A worker may be ahead of a server, where another server was faster: its contribution is kept until its turn.
    """

    def __init__(self, workers: int, needed: int) -> None:
        self.needed, self.clock, self.dropped = needed, 0, 0
        self._offered, self._made = [-1] * workers, [-1] * workers
        self._pending: dict[int, dict[int, Contribution]] = {}

    def offer(self, contribution: Contribution) -> None:
        worker, clock = contribution.worker, contribution.clock
        self._offered[worker] = clock
        if clock >= self.clock:
            self._pending.setdefault(clock, {})[worker] = contribution
        elif clock > self._made[worker]:
            self.dropped += 1

    def next(self) -> list[Contribution]:
        found = self._pending.get(self.clock, {})
        if len(found) < self.needed:
            return []
        # in order of workers: the sum must not depend on who was first
        return [found[worker] for worker in sorted(found)]

    def made(self, contributions: list[Contribution]) -> None:
        for contribution in contributions:
            self._made[contribution.worker] = contribution.clock
        self._pending.pop(self.clock, None)
        self.clock += 1

    def goes_on(self, worker: int) -> int | None:
        return self.clock if self._offered[worker] < self.clock else None

    def lead(self, worker: int) -> int:
        return 0

    def finished(self, steps: int) -> bool:
        return self.clock >= steps


class AsTheyCome:
    """Every contribution is an update; who is more than `bound` steps ahead of the slowest waits (Ho 2013, SSP)."""

    def __init__(self, workers: int, bound: int | None) -> None:
        self.bound, self.dropped = bound, 0
        self._clocks = [0] * workers
        self._queue: deque[Contribution] = deque()

    def offer(self, contribution: Contribution) -> None:
        if contribution.clock >= self._clocks[contribution.worker]:
            self._queue.append(contribution)

    def next(self) -> list[Contribution]:
        return [self._queue.popleft()] if self._queue else []

    def made(self, contributions: list[Contribution]) -> None:
        for contribution in contributions:
            self._clocks[contribution.worker] = contribution.clock + 1

    def goes_on(self, worker: int) -> int | None:
        fine = self.bound is None or self.lead(worker) <= self.bound
        return self._clocks[worker] if fine else None

    def lead(self, worker: int) -> int:
        return self._clocks[worker] - min(self._clocks)

    def finished(self, steps: int) -> bool:
        return min(self._clocks) >= steps
