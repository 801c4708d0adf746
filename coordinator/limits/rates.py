"""Limits on rates: the requests of a device, so that one, or a copy of its key, takes only its share; wrong tokens; sign-ins.

Concurrent requests of a device are bounded too, since each may hold a block in memory. A daemon stays far below both.

A token is compared first, so the right one passes however many wrong ones came from the same address: on loopback and
behind a proxy, an attacker and the operator share one. The limits concern the answers to wrong tokens only, so they never
reject a guess unseen; a token's length makes guessing hopeless
(`coordinator.accounts.admin_token.MIN_TOKEN_CHARACTERS`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import ip_address, ip_network

import structlog

from coordinator.errors import Refusal

CONCURRENT_REQUESTS = 8
REQUESTS_PER_SECOND = 200.0
BURST_REQUESTS = 5000.0
"""Requests that a silent device accumulates at most."""
PER_ADDRESS = 20
OVERALL = 200
PER_NAME = 10
_NAME_REFILL_SECONDS = 600.0
_REFILL_SECONDS = 60.0
_MAX_KEYS = 10_000
"""Keys kept before full buckets are dropped."""

_log = structlog.get_logger("fedloop.tokens")


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

    def give_back(self, key: Hashable) -> None:
        """Undoes a `take`."""
        self._levels[key] = (min(self._capacity, self._level(key) + 1.0), self._monotonic())

    def _level(self, key: Hashable) -> float:
        now = self._monotonic()
        level, at = self._levels.get(key, (self._capacity, now))
        return min(self._capacity, level + (now - at) * self._per_second)


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


class WrongTokens:
    """Wrong tokens of one kind in this process. For one thread only, that of the event loop."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._by_address = TokenBuckets(PER_ADDRESS / _REFILL_SECONDS, PER_ADDRESS, monotonic)
        self._all = TokenBuckets(OVERALL / _REFILL_SECONDS, OVERALL, monotonic)

    def record(self, kind: str, address: str | None) -> None:
        """Counts a wrong token from this address.

        Raises:
            Refusal: 429 `too_many_guesses`: there were too many.
        """
        network = network_of(address or "")
        wait = self._all.wait_seconds(None) or self._by_address.take(network)
        if wait:
            raise Refusal(
                429,
                "too_many_guesses",
                f"too many wrong tokens; wait {math.ceil(wait)} s before the next one. The right one is always accepted",
                retry_after_seconds=wait,
                closes=True,
            )
        self._all.take(None)
        _log.warning("wrong_token", kind=kind, address=network)


class SignIns:
    """Attempts to sign in with a password. For one thread only, that of the event loop.

    People choose passwords, so a guess may be right: attempts are counted before the password is compared, and those that
    succeed are given back. Who floods a name keeps its owner from signing in, but ends no session and no token.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._by_name = TokenBuckets(PER_NAME / _NAME_REFILL_SECONDS, PER_NAME, monotonic)
        self._by_address = TokenBuckets(PER_ADDRESS / _REFILL_SECONDS, PER_ADDRESS, monotonic)
        self._all = TokenBuckets(OVERALL / _REFILL_SECONDS, OVERALL, monotonic)

    def attempt(self, name: str, address: str | None) -> None:
        """Counts an attempt.

        Raises:
            Refusal: 429 `too_many_guesses`: there were too many with this name, from this address, or in all.
        """
        wait = max(bucket.wait_seconds(key) for bucket, key in self._buckets(name, address))
        if wait:
            raise Refusal(
                429,
                "too_many_guesses",
                f"too many attempts to sign in; wait {math.ceil(wait)} s before the next one",
                retry_after_seconds=wait,
                closes=True,
            )
        for bucket, key in self._buckets(name, address):
            bucket.take(key)

    def succeeded(self, name: str, address: str | None) -> None:
        """Gives an attempt back."""
        for bucket, key in self._buckets(name, address):
            bucket.give_back(key)

    def _buckets(self, name: str, address: str | None) -> tuple[tuple[TokenBuckets, Hashable], ...]:
        return (self._by_name, name), (self._by_address, network_of(address or "")), (self._all, None)


@lru_cache(1024)
def network_of(address: str) -> str:
    """The range that one household, server or attacker controls: an IPv4 address, or the /64 prefix of an IPv6 address."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return str(parsed) if parsed.version == 4 else str(ip_network((parsed, 64), strict=False))
