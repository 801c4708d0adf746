"""Who this device is to its coordinator: identity, the line that shows it, and the next certificate in time.

A date that nobody vouched for renews nothing: first the coordinator's clock is heard. A refusal ends the membership only
where the coordinator says so for good; anything else may come from somebody between, or pass, and a fleet is not to
lock itself out.
"""

from __future__ import annotations

from collections.abc import Callable

from edge_client import identity
from edge_client.clock import CLOCK_TOLERANCE_SECONDS, Clock, clock_words
from edge_client.config import EdgeConfig
from edge_client.errors import Stopped, UserMistake
from edge_client.failures import ServerRefused, Unreachable, WrongClock
from edge_client.identity import Identity
from edge_client.link import Link, pinned, unverified_date
from edge_client.surroundings import Surroundings

FINAL = ("revoked", "unknown_device")
"""Codes with which the coordinator says that it knows this device no more."""

_RENEW_AGAIN_SECONDS = 3600.0


class Membership:
    """Of one daemon. `begin` comes first. `note`: words for a person to find later."""

    def __init__(self, config: EdgeConfig, around: Surroundings, note: Callable[[str], None]) -> None:
        self._config = config
        self._around = around
        self._note = note
        self._clock = Clock(around.now, around.wall)
        self._identity: Identity | None = None
        self._link: Link | None = None
        self._renew_not_before = 0.0
        self.expired = False
        """The coordinator takes the certificate no more because of its dates."""

    @property
    def identity(self) -> Identity:
        assert self._identity is not None
        return self._identity

    @property
    def link(self) -> Link:
        assert self._link is not None
        return self._link

    @property
    def renew_at(self) -> float | None:
        """When the certificate is to be renewed, seconds since 1970; None: not enrolled."""
        if self._identity is None:
            return None
        return max(self._identity.renew_at, self._renew_not_before)

    def begin(self) -> None:
        """Raises UserMistake: this device was never enrolled."""
        self._identity = identity.load(self._config.state_dir)
        if self._identity is None:
            raise UserMistake("this device is not enrolled; run `fedloop-edge enroll URL TOKEN`")
        self._connect()

    def date(self) -> float:
        """Seconds since 1970, by the best clock there is."""
        return self._clock.date()

    def heard(self, date: float | None) -> None:
        """The coordinator's clock, where it told."""
        words = self._clock.hear(date) if date is not None else None
        if words is not None:
            self._note(words)

    def renew(self, expired: bool, tell: Callable[[], None]) -> None:
        """The next certificate, unless that can wait. `expired`: only a new one is taken; `tell`: called before it is asked for.

        Raises:
            Stopped: the coordinator knows this device no more.
            Unreachable, ServerRefused: there is no going on without.
        """
        if not self._clock.heard and not expired:
            self._hear_clock()
            return
        tell()
        expired = expired or self.date() >= self.identity.not_after
        try:
            self._identity = identity.renew(
                self._config.state_dir, self.identity, expired=expired, proxy=self._config.proxy
            )
        except ServerRefused as refused:
            if refused.code in FINAL:
                raise Stopped(
                    f"the coordinator renews this device's certificate no more: {refused}"
                ) from None
            if expired:
                raise
            self._put_off_renewal(str(refused))
            return
        except Unreachable as error:
            if expired:
                raise
            self._put_off_renewal(str(error))
            return
        self.expired = False
        self._connect()

    def diagnosis(self, error: WrongClock) -> str:
        """What a person is told of a clock that does not agree with the coordinator's certificate."""
        date = unverified_date(self.identity.url, self._config.proxy)
        behind = None if date is None else date - self._around.wall()
        if behind is None or abs(behind) <= CLOCK_TOLERANCE_SECONDS:
            return f"{error}; this machine's clock agrees with the coordinator's: its certificate must be renewed"
        return clock_words(-behind)

    def _put_off_renewal(self, words: str) -> None:
        """The certificate is good for a while yet; work goes on meanwhile."""
        self._renew_not_before = self.date() + self._around.rng.uniform(0.5, 1.0) * _RENEW_AGAIN_SECONDS
        self._note(f"renewal failed, tried again later: {words}")

    def _hear_clock(self) -> None:
        link = Link(self.identity.url, pinned(self.identity.ca_pem), proxy=self._config.proxy)
        try:
            date = link.date("/ca")
        finally:
            link.close()
        self.heard(date if date is not None else self._around.wall())

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()
        context = pinned(self.identity.ca_pem, self.identity.credentials)
        self._link = Link(self.identity.url, context, proxy=self._config.proxy)
