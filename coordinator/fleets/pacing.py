"""Pacing: when each device comes back, so that ten thousand do not come at once.

Devices of a live run are held in a long poll, so that their task starts at once; there is room for so many.
All others come back after a time that spreads the whole fleet evenly, with jitter against marching in step.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

LEAST_SECONDS = 5.0
MOST_SECONDS = 3600.0
_COUNT_KEPT_SECONDS = 10.0


def next_seconds(fleet_size: int, checkins_per_second: float, rng: random.Random) -> float:
    """Seconds until a device is to check in again; the mean over the fleet keeps the rate."""
    middle = max(LEAST_SECONDS, fleet_size / checkins_per_second)
    return min(MOST_SECONDS, middle * rng.uniform(0.75, 1.25))


class Pacing:
    """The long polls of this process, and the size of the fleet, counted now and then."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._lock = threading.Lock()
        self._rng = rng or random.Random()
        self._held = 0
        self._counted_at: float | None = None
        self._fleet_size = 0

    @property
    def held(self) -> int:
        """Devices in a long poll right now."""
        return self._held

    @contextmanager
    def room(self, most: int) -> Iterator[bool]:
        """Takes a place among `most` long polls while the block runs; False where there is none."""
        with self._lock:
            got = self._held < most
            self._held += got
        try:
            yield got
        finally:
            with self._lock:
                self._held -= got

    def next_seconds(self, count: Callable[[], int], checkins_per_second: float) -> float:
        """As the function; `count` is asked for the fleet's size every ten seconds at most."""
        now = monotonic()
        if self._counted_at is None or now - self._counted_at > _COUNT_KEPT_SECONDS:
            self._fleet_size, self._counted_at = count(), now
        return next_seconds(self._fleet_size, checkins_per_second, self._rng)
