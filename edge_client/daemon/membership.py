"""The device's membership: its identity, the connection that presents it, and the renewal of its certificate.

The device renews only by a confirmed date: it reads the coordinator's clock first. A refusal ends the membership only if
its code is final; any other refusal may be temporary or come from an intermediary, and must not lock out a fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from edge_client.clock import Clock
from edge_client.config import EdgeConfig
from edge_client.daemon.host_environment import HostEnvironment
from edge_client.errors import Stopped, UserError
from edge_client.transport import identity
from edge_client.transport.failures import ServerRefused, Unreachable, WrongClock
from edge_client.transport.identity import Identity
from edge_client.transport.link import Link, describe_wrong_clock, pinned_context

FINAL = ("revoked", "unknown_device")
"""Codes that end the membership."""

_RENEW_RETRY_SECONDS = 3600.0


class Membership:
    """The membership of one daemon; call `begin` first. `note`: records a message for a person."""

    def __init__(self, config: EdgeConfig, host: HostEnvironment, note: Callable[[str], None]) -> None:
        self._config = config
        self._host = host
        self._note = note
        self._clock = Clock(host.now, host.wall)
        self._identity: Identity | None = None
        self._link: Link | None = None
        self._renew_not_before = 0.0
        self.expired = False
        """Whether the coordinator rejects the certificate because of its dates."""

    @property
    def identity(self) -> Identity:
        assert self._identity is not None
        return self._identity

    @property
    def url(self) -> str:
        """Where the device's requests go: to its relay, if one is configured."""
        return self._config.relay or self.identity.url

    @property
    def link(self) -> Link:
        assert self._link is not None
        return self._link

    @property
    def renew_at(self) -> float:
        """When to renew the certificate, seconds since 1970."""
        return max(self.identity.renew_at, self._renew_not_before)

    def begin(self) -> None:
        """Connects. Raises UserError if this device was never enrolled."""
        self._identity = identity.load(self._config.state_dir)
        if self._identity is None:
            raise UserError("this device is not enrolled; run `fedloop-edge enroll URL TOKEN`")
        self._connect()

    def date(self) -> float:
        """Seconds since 1970, by the best clock available."""
        return self._clock.date()

    def update_clock(self, date: float | None) -> None:
        """Takes the coordinator's date, if it sent one."""
        warning = self._clock.update(date) if date is not None else None
        if warning is not None:
            self._note(warning)

    def renew(self, expired: bool, announce: Callable[[], None]) -> None:
        """Renews the certificate. `expired`: there is no working without a new one. `announce`: called before the request.

        Raises:
            Stopped: the membership has ended.
            Unreachable, ServerRefused: the renewal failed and cannot wait.
        """
        if not self._clock.is_synchronized and not expired:
            self._read_clock()
            return
        announce()
        expired = expired or self.date() >= self.identity.not_after
        try:
            self._identity = identity.renew(
                self._config.state_dir,
                self.identity,
                expired=expired,
                proxy=self._config.proxy,
                relay=self._config.relay,
            )
        except (ServerRefused, Unreachable) as error:
            if isinstance(error, ServerRefused) and error.code in FINAL:
                raise Stopped(
                    f"the coordinator no longer renews this device's certificate: {error}"
                ) from None
            if expired:
                raise
            # The certificate is still valid, and work goes on.
            wait_seconds = self._host.rng.uniform(0.5, 1.0) * _RENEW_RETRY_SECONDS
            self._renew_not_before = self.date() + wait_seconds
            self._note(f"renewal failed, will be retried: {error}")
            return
        self.expired = False
        self._connect()

    def diagnosis(self, error: WrongClock) -> str:
        """A message for people about a clock that disagrees with the coordinator's certificate."""
        return describe_wrong_clock(error, self.url, self._host.wall(), self._config.proxy)

    def _read_clock(self) -> None:
        context = pinned_context(self.identity.ca_pem)
        with closing(Link(self.url, context, proxy=self._config.proxy)) as link:
            date = link.date("/ca")
        self.update_clock(date if date is not None else self._host.wall())

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()
        context = pinned_context(self.identity.ca_pem, self.identity.credentials)
        self._link = Link(self.url, context, proxy=self._config.proxy)
