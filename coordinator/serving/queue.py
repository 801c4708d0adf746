"""The requests that wait for a model, and the batch that is taken from them next.

There is no waiting window: whenever a worker can take a batch, it gets the largest one that meets the earliest deadline among those in
it, by the profile (Nexus, Shen 2019, section 4; Clockwork, Gujarati 2020, section 4.3). What cannot be in time any more, even alone, is
refused instead of computed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from coordinator.serving.profile import Profile

NEVER = math.inf
_LOWEST_PRIORITY = 2**32


@dataclass(eq=False)
class Waiting:
    """Rows that wait. `deadline`: on the clock of the caller; `attempts`: workers that have ended while they had it."""

    x: npt.NDArray[Any]
    deadline: float
    priority: int
    arrived: float
    on_done: Callable[[Any, float, float], None]
    """Called once with the logits or a `Refusal`, the seconds in the queue and the seconds of the computation."""
    attempts: int = 0
    is_dropped: bool = False
    patience: float = 0.0
    """Seconds from when a worker is there, if none was as it arrived; then `deadline` is set as soon as one is."""

    @property
    def rows(self) -> int:
        return len(self.x)


@dataclass
class Queue:
    """Requests in the order of their priorities, then of their deadlines, then of their arrival. `rows`: of all of them."""

    max_batch: int
    rows: int = 0
    _heap: list[tuple[int, float, int, Waiting]] = field(default_factory=list)
    _count: Any = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, waiting: Waiting) -> None:
        priority = waiting.priority or _LOWEST_PRIORITY
        heapq.heappush(self._heap, (priority, waiting.deadline, next(self._count), waiting))
        self.rows += waiting.rows

    def take(self, starts: float, profile: Profile) -> tuple[list[Waiting], list[Waiting]]:
        """The next batch, which would begin at the time `starts`, and the requests that cannot be in time any more.

        Requests that were dropped are left out. A request that was taken from a dead worker is a batch by itself.
        """
        batch: list[Waiting] = []
        late: list[Waiting] = []
        rows, earliest = 0, NEVER
        while self._heap:
            waiting = self._heap[0][3]
            if waiting.is_dropped:
                self._pop()
                continue
            if starts + profile.seconds(waiting.rows) > waiting.deadline:
                late.append(self._pop())
                continue
            if waiting.attempts:
                if not batch:
                    batch.append(self._pop())
                break
            together = rows + waiting.rows
            deadline = min(earliest, waiting.deadline)
            if batch and (together > self.max_batch or starts + profile.seconds(together) > deadline):
                break
            rows, earliest = together, deadline
            batch.append(self._pop())
        return batch, late

    def set_deadlines(self, now: float) -> None:
        """Sets the deadlines of requests that have waited for the first worker."""
        held = [entry[3] for entry in self._heap]
        self._heap, self.rows = [], 0
        for waiting in held:
            if waiting.patience:
                waiting.deadline, waiting.patience = now + waiting.patience, 0.0
            self.add(waiting)

    def oldest(self) -> float:
        """When the request arrived that has waited longest. Not of an empty queue."""
        return min(entry[3].arrived for entry in self._heap)

    def drain(self) -> Sequence[Waiting]:
        """Takes all of them."""
        held = [entry[3] for entry in self._heap if not entry[3].is_dropped]
        self._heap, self.rows = [], 0
        return held

    def _pop(self) -> Waiting:
        waiting = heapq.heappop(self._heap)[3]
        self.rows -= waiting.rows
        return waiting
