"""Waiting times after failures."""

from __future__ import annotations

import random


class Backoff:
    """Waiting time after the n-th failure in a row: uniform up to min(longest, first · 2ⁿ), full jitter.

    Full jitter spreads devices that failed together better than any other scheme (Brooker 2015). `at_least`, which the
    coordinator may ask for, is added. `at_most` lowers the limit while the coordinator is expected back soon.
    """

    def __init__(
        self, rng: random.Random, *, first_seconds: float = 1.0, longest_seconds: float = 300.0
    ) -> None:
        self._rng = rng
        self._first = first_seconds
        self._longest = longest_seconds
        self._failures = 0

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, at_least: float | None = None, *, at_most: float | None = None) -> float:
        """Seconds to wait now."""
        longest = self._longest if at_most is None else min(at_most, self._longest)
        ceiling = min(longest, self._first * 2**self._failures)
        self._failures += ceiling < longest
        return (at_least or 0.0) + self._rng.uniform(0.0, ceiling)
