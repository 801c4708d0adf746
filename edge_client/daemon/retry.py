"""When to try the coordinator again after failures."""

from __future__ import annotations

import random
from collections.abc import Callable

from edge_client.transport.backoff import Backoff

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
