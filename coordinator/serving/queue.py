"""The requests that wait for a model, and the batch that is taken from them next.

There is no waiting window: whenever a worker can take a batch, it gets the largest one that meets the earliest deadline among those in
it, by the profile (Nexus, Shen 2019, section 4; Clockwork, Gujarati 2020, section 4.3). What cannot be in time any more is refused
instead of computed: on arrival, if the rows before it fill the time until its deadline; and when a batch is taken, if it is late even
alone, or if more rows wait than a batch has and it would keep that batch small (Nexus, section 6.3, early drop).
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
_BATCH_SHARE = 0.5
"""Of its time limit that the batch of a request should take at most: the other half is for the batch before it (Nexus, section 4.1)."""
_MARGIN_SHARE = 0.25
"""Of its time limit that is left for surprises at most."""


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

    @property
    def limit(self) -> float:
        """Seconds from its arrival to its deadline."""
        return self.deadline - self.arrived

    def last_end(self, margin: float) -> float:
        """When its batch should end at the latest, with a margin for surprises."""
        return self.deadline - min(margin, _MARGIN_SHARE * self.limit) if self.deadline < NEVER else NEVER


@dataclass
class _Priority:
    """Requests of one priority, as a heap by their deadlines, then by their arrival. `latest`: deadline, since it was empty."""

    heap: list[tuple[float, int, Waiting]] = field(default_factory=list)
    rows: int = 0
    latest: float = 0.0


@dataclass
class Queue:
    """Requests in the order of their priorities, then of their deadlines, then of their arrival. `rows`: of all of them."""

    max_batch: int
    rows: int = 0
    _priorities: dict[int, _Priority] = field(default_factory=dict)
    _count: Any = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return sum(len(each.heap) for each in self._priorities.values())

    def add(self, waiting: Waiting) -> None:
        same = self._priorities.setdefault(waiting.priority or _LOWEST_PRIORITY, _Priority())
        heapq.heappush(same.heap, (waiting.deadline, next(self._count), waiting))
        same.rows += waiting.rows
        same.latest = max(same.latest, waiting.deadline)
        self.rows += waiting.rows

    def ends(self, waiting: Waiting, free: Sequence[float], profile: Profile, margin: float = 0.0) -> float:
        """When a request would be computed that arrives now. `free`: when each worker can begin a batch, the earliest first."""
        total = self._rows_before(waiting) + waiting.rows
        if total <= self.max_batch:
            together = free[0] + profile.seconds(total)
            if together <= waiting.last_end(margin):
                return together
        size = self._size(waiting, profile)
        before = -(-total // size) - 1
        last = max(total - before * size, waiting.rows)
        turns, place = divmod(before, len(free))
        return free[place] + turns * profile.seconds(size) + profile.seconds(last)

    def take(
        self, starts: float, profile: Profile, margin: float = 0.0
    ) -> tuple[list[Waiting], list[Waiting]]:
        """The next batch, which would begin at the time `starts`, and the requests that cannot be in time any more.

        Requests that were dropped are left out. A request that was taken from a dead worker is a batch by itself. `margin`: seconds
        that a batch may take longer than the profile says.
        """
        batch: list[Waiting] = []
        late: list[Waiting] = []
        rows, latest = 0, NEVER
        for number in sorted(self._priorities):
            same = self._priorities[number]
            while (
                waiting := self._first_in_time(same, starts, profile, margin, late, not batch)
            ) is not None:
                together = rows + waiting.rows
                most = min(latest, waiting.last_end(margin))
                if batch and (
                    waiting.attempts
                    or batch[0].attempts
                    or together > self.max_batch
                    or starts + profile.seconds(together) > most
                ):
                    break
                batch.append(self._pop(same))
                rows, latest = together, most
            if not same.heap:
                del self._priorities[number]
        return batch, late

    def take_late(self, starts: float, profile: Profile, margin: float = 0.0) -> list[Waiting]:
        """The requests that cannot be in time if the next batch begins at the time `starts`."""
        late: list[Waiting] = []
        for same in self._priorities.values():
            self._first_in_time(same, starts, profile, margin, late, False)
        return late

    def set_deadlines(self, now: float) -> None:
        """Sets the deadlines of requests that have waited for the first worker."""
        for waiting in self._clear():
            if waiting.patience:
                waiting.deadline, waiting.patience = now + waiting.patience, 0.0
            self.add(waiting)

    def drain(self) -> Sequence[Waiting]:
        """Takes all of them."""
        return [each for each in self._clear() if not each.is_dropped]

    def _first_in_time(
        self,
        same: _Priority,
        starts: float,
        profile: Profile,
        margin: float,
        late: list[Waiting],
        begins: bool,
    ) -> Waiting | None:
        """The first request that is not too late; those before it go to `late`. `begins`: a batch that is empty."""
        while same.heap:
            waiting = same.heap[0][2]
            if waiting.is_dropped:
                self._pop(same)
            elif starts + profile.seconds(waiting.rows) > waiting.last_end(margin) or (
                begins and self._keeps_small(same, waiting, starts, profile, margin)
            ):
                late.append(self._pop(same))
            else:
                return waiting
        return None

    def _keeps_small(
        self, same: _Priority, waiting: Waiting, starts: float, profile: Profile, margin: float
    ) -> bool:
        """Whether a whole batch waits that could not meet this request's deadline."""
        latest = waiting.last_end(margin)
        if starts + profile.seconds(min(same.rows, self.max_batch)) <= latest:
            return False
        size = self._size(waiting, profile)
        return same.rows >= size > waiting.rows and starts + profile.seconds(size) > latest

    def _size(self, waiting: Waiting, profile: Profile) -> int:
        """The rows of the batches that such requests should form while many of them wait."""
        if waiting.deadline == NEVER:
            return self.max_batch
        return max(waiting.rows, profile.rows_within(_BATCH_SHARE * waiting.limit, self.max_batch))

    def _rows_before(self, waiting: Waiting) -> int:
        """Rows of the requests that go before one that arrives now."""
        own = waiting.priority or _LOWEST_PRIORITY
        rows = 0
        for priority, same in self._priorities.items():
            if priority < own or (priority == own and same.latest <= waiting.deadline):
                rows += same.rows
            elif priority == own:
                rows += sum(other.rows for deadline, _, other in same.heap if deadline <= waiting.deadline)
        return rows

    def _pop(self, same: _Priority) -> Waiting:
        waiting = heapq.heappop(same.heap)[2]
        same.rows -= waiting.rows
        self.rows -= waiting.rows
        return waiting

    def _clear(self) -> list[Waiting]:
        held = [entry[2] for number in sorted(self._priorities) for entry in self._priorities[number].heap]
        self._priorities, self.rows = {}, 0
        return held
