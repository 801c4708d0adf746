"""Limits per device, so that one device, or a copy of its key, takes only its share of the coordinator.

They bound concurrent requests, since each may hold a block in memory, and the rate in the long run. A daemon stays far
below both.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.errors import Refusal
from coordinator.limits.token_buckets import TokenBuckets

CONCURRENT_REQUESTS = 8
REQUESTS_PER_SECOND = 200.0
BURST_REQUESTS = 5000.0
"""Requests that a silent device accumulates at most."""


class DeviceRequests:
    """The requests of this process, by device. For one thread only, that of the event loop."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._in_progress: Counter[str] = Counter()
        self._buckets = TokenBuckets(REQUESTS_PER_SECOND, BURST_REQUESTS, monotonic)

    @contextmanager
    def request(self, device: str) -> Iterator[None]:
        """Entered while a request of the device is answered. Raises: Refusal: 429 `too_many_requests`."""
        if self._in_progress[device] >= CONCURRENT_REQUESTS:
            raise _too_many(f"{CONCURRENT_REQUESTS} requests of this device are in progress")
        if wait := self._buckets.take(device):
            raise _too_many(f"this device sent more than {REQUESTS_PER_SECOND:.0f} requests per second", wait)
        self._in_progress[device] += 1
        try:
            yield
        finally:
            self._in_progress[device] -= 1
            if not self._in_progress[device]:
                del self._in_progress[device]


def _too_many(reason: str, wait_seconds: float = 1.0) -> Refusal:
    return Refusal(
        429, "too_many_requests", f"{reason}; wait before the next one", retry_after_seconds=wait_seconds
    )
