"""Limits per certificate: one device, or whoever copied its key, takes no more of the coordinator than its share.

So many requests at a time, since each may hold a block in memory; and so many a second in the long run. A daemon
comes nowhere near either.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.errors import Refusal

AT_A_TIME = 8
PER_SECOND = 200.0
AT_ONCE = 5000.0
"""Requests that a device may have saved up by being silent."""


class Limits:
    """The requests of this process, by device. For one thread: that of the event loop."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._now: Counter[str] = Counter()
        self._saved: dict[str, tuple[float, float]] = {}
        """Requests left, and when that was."""

    @contextmanager
    def request(self, device: str) -> Iterator[None]:
        """Held while a request of the device is answered.

        Raises:
            Refusal: 429 `too_many_requests`.
        """
        if self._now[device] >= AT_A_TIME:
            raise _too_many(f"{AT_A_TIME} requests of this device are being answered already")
        self._spend(device)
        self._now[device] += 1
        try:
            yield
        finally:
            self._now[device] -= 1
            if not self._now[device]:
                del self._now[device]

    def _spend(self, device: str) -> None:
        now = self._monotonic()
        left, at = self._saved.get(device, (AT_ONCE, now))
        left = min(AT_ONCE, left + (now - at) * PER_SECOND)
        if left < 1:
            raise _too_many(f"more than {PER_SECOND:.0f} requests a second came from this device")
        self._saved[device] = (left - 1, now)


def _too_many(words: str) -> Refusal:
    return Refusal(429, "too_many_requests", f"{words}; wait before the next one")
