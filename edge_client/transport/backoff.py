"""Waiting times after failures, and when to try the coordinator again."""

from __future__ import annotations

import random
from collections.abc import Callable


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


SOON_SECONDS, SOON_FOR_SECONDS = 5.0, 60.0
"""A coordinator that counted on this device and went away is probably restarting: for the first minute it is tried
at least this often."""


class RetrySchedule:
    """`at`: when to try again, by `now`; 0: the last try did not fail."""

    def __init__(self, now: Callable[[], float], rng: random.Random) -> None:
        self._now = now
        self._backoff = Backoff(rng)
        self._expected_since: float | None = None
        self.at = 0.0

    def succeeded(self) -> None:
        self._backoff.succeeded()
        self._expected_since = None
        self.at = 0.0

    def failed(self, at_least: float | None, *, expected_back: bool) -> None:
        """Schedules the next try. `expected_back`: the coordinator counted on this device before the failure."""
        now = self._now()
        if expected_back and self._expected_since is None:
            self._expected_since = now
        soon = self._expected_since is not None and now - self._expected_since < SOON_FOR_SECONDS
        self.at = now + self._backoff.failed(at_least, at_most=SOON_SECONDS if soon else None)
