"""Pacing: when each device comes back, so that ten thousand do not come at once.

Devices of a live run are held in a long poll, so that their task starts at once; there is room for so many.
Each other check-in is given the next free moment of a timetable with so many moments a second, none earlier than
the whole fleet takes to come once. So devices that came together, after a power cut say, come back one by one.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic as monotonic_clock

LEAST_SECONDS = 5.0
MOST_SECONDS = 3600.0
MOST_POLLS_OF_A_DEVICE = 2
"""A device whose line was cut polls anew before the coordinator knows that the old poll is nobody's any more."""

_COUNT_KEPT_SECONDS = 10.0
_LATEST = 3.0
"""How many turns of the whole fleet the timetable is filled ahead."""


class Pacing:
    """The long polls of this process, and the timetable."""

    def __init__(
        self, rng: random.Random | None = None, monotonic: Callable[[], float] = monotonic_clock
    ) -> None:
        self._lock = threading.Lock()
        self._rng = rng or random.Random()
        self._monotonic = monotonic
        self._held: Counter[str] = Counter()
        self._counted_at: float | None = None
        self._fleet_size = 0
        self._given = 0.0

    @property
    def held(self) -> int:
        """Long polls right now."""
        return self._held.total()

    @contextmanager
    def room(self, most: int, device: str) -> Iterator[bool]:
        """Takes a place among `most` long polls while the block runs; False where there is none for this device."""
        with self._lock:
            got = self._held.total() < most and self._held[device] < MOST_POLLS_OF_A_DEVICE
            self._held[device] += got
        try:
            yield got
        finally:
            with self._lock:
                self._held[device] -= got
                if not self._held[device]:
                    del self._held[device]

    def next_seconds(self, count: Callable[[], int], checkins_per_second: float) -> float:
        """Seconds until a device that checks in now is to come back, 5 to 3600.

        `count` is asked for the fleet's size every ten seconds at most.
        """
        now = self._monotonic()
        if self._counted_at is None or now - self._counted_at > _COUNT_KEPT_SECONDS:
            self._fleet_size, self._counted_at = count(), now
        turn = max(LEAST_SECONDS, self._fleet_size / checkins_per_second)
        with self._lock:
            moment = max(self._given + 1 / checkins_per_second, now + turn)
            if moment > now + _LATEST * turn:
                # Somebody comes far more often than told, and uses the moments up; others do not wait for that.
                moment = now + turn * self._rng.uniform(1.0, _LATEST)
            else:
                self._given = moment
        return min(MOST_SECONDS, moment - now)
