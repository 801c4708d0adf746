"""Limits on wrong tokens, per address and overall.

The token is compared first, so the right one passes however many wrong ones came from the same address: on loopback
and behind a proxy, an attacker and the operator share one. The limits concern the answers to wrong tokens only, so they
never reject a guess unseen; a token's length makes guessing hopeless
(`coordinator.accounts.admin_token.MIN_TOKEN_CHARACTERS`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from ipaddress import ip_address, ip_network

import structlog

from coordinator.errors import Refusal
from coordinator.limits.token_buckets import TokenBuckets

PER_ADDRESS = 20
OVERALL = 200
_REFILL_SECONDS = 60.0

_log = structlog.get_logger("fedloop.tokens")


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
        network = _network(address)
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


def _network(address: str | None) -> str:
    """The address range that one attacker controls: an IPv4 address, or an IPv6 /64."""
    try:
        parsed = ip_address((address or "").partition("%")[0])
    except ValueError:
        return "unknown"
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return str(parsed) if parsed.version == 4 else str(ip_network((parsed, 64), strict=False))
