"""Pacing: spreads check-ins over time, so that ten thousand devices do not check in at once.

Devices of a live run are held in a long poll, so that their task starts immediately; the number of long polls is limited.
Every other check-in gets the next free slot of a timetable with a fixed number of slots per second. No slot is earlier
than the time that the fleet needs to check in once. Devices that checked in together, for example after a power cut,
are therefore spread out.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic as monotonic_clock

MIN_SECONDS = 5.0
MAX_SECONDS = 3600.0
MAX_POLLS_PER_DEVICE = 2
"""A device that lost its connection polls again before the coordinator notices that the old poll is dead."""

_COUNT_KEPT_SECONDS = 10.0
_MAX_TURNS_AHEAD = 3.0
"""How many rounds of check-ins by the fleet the timetable is filled ahead."""


class Pacing:
    """The open long polls of this process, and the timetable of check-ins."""

    def __init__(
        self, rng: random.Random | None = None, monotonic: Callable[[], float] = monotonic_clock
    ) -> None:
        self._lock = threading.Lock()
        self._rng = rng or random.Random()
        self._monotonic = monotonic
        self._held: Counter[str] = Counter()
        self._counted_at: float | None = None
        self._fleet_size = 0
        self._last_slot = 0.0

    @contextmanager
    def poll_slot(self, limit: int, device: str) -> Iterator[bool]:
        """Takes one of `limit` long polls while the block runs; False if none is free for this device."""
        with self._lock:
            is_free = self._held.total() < limit and self._held[device] < MAX_POLLS_PER_DEVICE
            self._held[device] += is_free
        try:
            yield is_free
        finally:
            with self._lock:
                self._held[device] -= is_free
                if not self._held[device]:
                    del self._held[device]

    def next_seconds(self, count: Callable[[], int], checkins_per_second: float) -> float:
        """Seconds until the next check-in of a device that checks in now, 5 to 3600.

        `count` returns the size of the fleet; it is called at most every ten seconds.
        """
        now = self._monotonic()
        if self._counted_at is None or now - self._counted_at > _COUNT_KEPT_SECONDS:
            self._fleet_size, self._counted_at = count(), now
        turn = max(MIN_SECONDS, self._fleet_size / checkins_per_second)
        with self._lock:
            slot = max(self._last_slot + 1 / checkins_per_second, now + turn)
            if slot > now + _MAX_TURNS_AHEAD * turn:
                # A device that checks in far more often than told uses up slots; others must not wait for that.
                slot = now + turn * self._rng.uniform(1.0, _MAX_TURNS_AHEAD)
            else:
                self._last_slot = slot
        return min(MAX_SECONDS, slot - now)
