"""Sign-ins that have begun: the browser is at the provider and will come back with a code and the state.

They are in memory only: after a restart a user begins again. Each is taken once, by the browser that began it, within ten minutes.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from coordinator.errors import Refusal
from coordinator.limits.rates import OVERALL, PER_ADDRESS, TokenBuckets, network_of

LIFETIME = timedelta(minutes=10)
_REFILL_SECONDS = 60.0


@dataclass(frozen=True)
class PendingSignIn:
    """What the coordinator must know when the browser comes back. `browser`: secret in the cookie of the one that began."""

    browser: str
    verifier: str
    nonce: str
    redirect_uri: str
    begun_at: datetime


class PendingSignIns:
    """The sign-ins of one process. For one thread only, that of the event loop."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._by_state: dict[str, PendingSignIn] = {}
        self._by_address = TokenBuckets(PER_ADDRESS / _REFILL_SECONDS, PER_ADDRESS, monotonic)
        self._all = TokenBuckets(OVERALL / _REFILL_SECONDS, OVERALL, monotonic)

    def begin(self, redirect_uri: str, address: str | None, now: datetime) -> tuple[str, PendingSignIn]:
        """A new sign-in, and its state. Their rate bounds the memory.

        Raises:
            Refusal: 429 `too_many_guesses`: too many began from this address, or in all.
        """
        network = network_of(address or "")
        wait = self._all.wait_seconds(None) or self._by_address.take(network)
        if wait:
            raise Refusal(
                429,
                "too_many_guesses",
                "too many sign-ins were begun; wait a minute",
                retry_after_seconds=wait,
            )
        self._all.take(None)
        self._by_state = {
            state: each for state, each in self._by_state.items() if now - each.begun_at < LIFETIME
        }
        state, browser, verifier, nonce = (secrets.token_urlsafe(32) for _ in range(4))
        self._by_state[state] = PendingSignIn(browser, verifier, nonce, redirect_uri, now)
        return state, self._by_state[state]

    def take(self, state: str, browser: str | None, now: datetime) -> PendingSignIn:
        """The sign-in with this state, which ends with it.

        Raises:
            Refusal: 401 `oidc_state`: there is none, it was used or has expired, or another browser began it.
        """
        pending = self._by_state.pop(state, None)
        if (
            pending is None
            or now - pending.begun_at >= LIFETIME
            or not hmac.compare_digest(pending.browser.encode(), (browser or "").encode())
        ):
            raise Refusal(
                401,
                "oidc_state",
                "this sign-in was not begun in this browser, was used already or has expired; sign in again",
            )
        return pending
