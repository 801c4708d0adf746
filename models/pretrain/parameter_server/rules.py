"""Which gradients make an update, and which workers wait: no transport, no torch.

A worker's clock is the index of the global batch it computes, from 0. A rule is offered contributions, selects those
of the `next` update, none if it is not ready, is notified of those `applied`, here or at a replica, and decides the
`next_clock` of a worker, None if it waits. `lead` is the number of steps that a worker is ahead of the slowest, `dropped`
the number of contributions that came too late, and after `finished` all updates of so many global batches are made.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from models.pretrain.parameter_server.settings import Servers


@dataclass(frozen=True)
class Contribution:
    """One worker's part of an update.

    Attributes:
        version: number of updates in the params it was computed with, of its shard.
        loss: mean over its share of the batch, scaled so that the mean over workers is that of the batch.
        gradients: of the shard's params, scaled alike; left out where only the contributor matters.
    """

    worker: int
    clock: int
    version: int
    loss: float
    gradients: Any = ()


class SyncRule:
    """The first `needed` contributions of a clock make an update; later ones are dropped (Chen 2016, Algorithm 3).

    A worker may be ahead of a server when another server was faster: its contribution waits for its turn.
    """

    def __init__(self, workers: int, needed: int) -> None:
        self.needed, self.clock, self.dropped = needed, 0, 0
        self._offered, self._applied = [-1] * workers, [-1] * workers
        self._pending: dict[int, dict[int, Contribution]] = {}

    def offer(self, contribution: Contribution) -> None:
        worker, clock = contribution.worker, contribution.clock
        self._offered[worker] = clock
        if clock >= self.clock:
            self._pending.setdefault(clock, {})[worker] = contribution
        elif clock > self._applied[worker]:
            self.dropped += 1

    def next(self) -> list[Contribution]:
        pending = self._pending.get(self.clock, {})
        if len(pending) < self.needed:
            return []
        # in order of workers: the sum must not depend on who was first
        return [pending[worker] for worker in sorted(pending)]

    def applied(self, contributions: list[Contribution]) -> None:
        for contribution in contributions:
            self._applied[contribution.worker] = contribution.clock
        self._pending.pop(self.clock, None)
        self.clock += 1

    def next_clock(self, worker: int) -> int | None:
        return self.clock if self._offered[worker] < self.clock else None

    def lead(self, worker: int) -> int:
        return 0

    def finished(self, steps: int) -> bool:
        return self.clock >= steps


class AsyncRule:
    """Every contribution is an update; workers more than `bound` steps ahead of the slowest wait (Ho 2013, SSP)."""

    def __init__(self, workers: int, bound: int | None) -> None:
        self.bound, self.dropped = bound, 0
        self._clocks = [0] * workers
        self._queue: deque[Contribution] = deque()

    def offer(self, contribution: Contribution) -> None:
        if contribution.clock >= self._clocks[contribution.worker]:
            self._queue.append(contribution)

    def next(self) -> list[Contribution]:
        return [self._queue.popleft()] if self._queue else []

    def applied(self, contributions: list[Contribution]) -> None:
        for contribution in contributions:
            self._clocks[contribution.worker] = contribution.clock + 1

    def next_clock(self, worker: int) -> int | None:
        within_bound = self.bound is None or self.lead(worker) <= self.bound
        return self._clocks[worker] if within_bound else None

    def lead(self, worker: int) -> int:
        return self._clocks[worker] - min(self._clocks)

    def finished(self, steps: int) -> bool:
        return min(self._clocks) >= steps


Rule = SyncRule | AsyncRule


def from_settings(servers: Servers) -> Rule:
    if servers.mode in ("sync", "k-of-n"):
        return SyncRule(servers.workers, servers.needed)
    return AsyncRule(servers.workers, servers.staleness if servers.mode == "ssp" else None)
