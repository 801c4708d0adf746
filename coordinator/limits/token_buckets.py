"""Token buckets by key: each allows a burst, and a rate in the long run."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

_MAX_KEYS = 10_000
"""Keys kept before full buckets are dropped."""


class TokenBuckets:
    """A bucket per key, full when the key is first seen. For one thread only."""

    def __init__(
        self, per_second: float, capacity: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._capacity = capacity
        self._monotonic = monotonic
        self._levels: dict[Hashable, tuple[float, float]] = {}
        """Key -> level, and the time at which it was that."""

    def wait_seconds(self, key: Hashable) -> float:
        """Seconds until a token is available; 0 if one is."""
        return max(0.0, (1.0 - self._level(key)) / self._per_second)

    def take(self, key: Hashable) -> float:
        """Takes a token and returns 0, or takes none and returns the seconds until one is available."""
        level = self._level(key)
        if level < 1.0:
            return (1.0 - level) / self._per_second
        if len(self._levels) >= _MAX_KEYS:
            self._levels = {
                other: kept for other, kept in self._levels.items() if self._level(other) < self._capacity
            }
        self._levels[key] = (level - 1.0, self._monotonic())
        return 0.0

    def _level(self, key: Hashable) -> float:
        now = self._monotonic()
        level, at = self._levels.get(key, (self._capacity, now))
        return min(self._capacity, level + (now - at) * self._per_second)
