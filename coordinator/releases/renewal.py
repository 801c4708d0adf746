"""Renewal of the repository: signs online metadata again at half of its lifetime, and warns before offline roles expire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.releases import roles
from coordinator.releases.repository import Repository
from coordinator.releases.role_states import RoleState

CHECK_SECONDS = 600.0
WARN_BEFORE = timedelta(days=30)
SIGN_AND_PUBLISH = (
    "fedloop release sign --keys keys --staging stick",
    "fedloop release publish --staging stick",
)
"""The last steps of every change to what is signed."""

_log = structlog.get_logger("fedloop.releases")


async def keep_fresh(repository: Repository, clock: Callable[[], datetime]) -> None:
    """Renews now and then periodically, for ever; logs failures and retries."""
    logged: list[str] = []
    while True:
        try:
            renewed = await asyncio.to_thread(repository.renew, clock())
            states = await asyncio.to_thread(repository.state)
        except Exception:  # a full disk or a damaged file: the coordinator continues to serve
            _log.exception("releases_not_renewed")
        else:
            if renewed:
                _log.info("releases_renewed", roles=renewed)
            current = warnings(states, clock())
            for each in current:
                if each not in logged:
                    _log.warning("releases_need_signatures", what=each)
            logged = current
        await asyncio.sleep(CHECK_SECONDS)


@dataclass(frozen=True)
class Need:
    """What people must do, in words, and the commands that do it, in order."""

    what: str
    commands: tuple[str, ...] = ()


def needs(states: Sequence[RoleState], now: datetime) -> list[Need]:
    """One for each role that people must sign again soon, or that devices refuse now."""
    found = []
    for each in states:
        until = f"{each.expires:%Y-%m-%d %H:%M} UTC"
        term = "fedloop release extend --root" if each.role == roles.ROOT else "fedloop release extend"
        commands = (f"{term} --staging stick", *SIGN_AND_PUBLISH)
        if each.offline and not each.is_valid:
            reason = f"expired at {until}" if now >= each.expires else "is not signed as the root requires"
            what = f"{each.role} {each.version} {reason}: devices install nothing until it is signed again"
            found.append(Need(what, commands))
        elif each.offline and each.expires - now < WARN_BEFORE:
            what = f"{each.role} {each.version} expires at {until}: sign it again before then"
            found.append(Need(what, commands))
        elif not each.is_valid:
            found.append(
                Need(
                    f"{each.role} {each.version} is not valid: the coordinator did not renew it; see its log"
                )
            )
    return found


def warnings(states: Sequence[RoleState], now: datetime) -> list[str]:
    """What people must do, in words."""
    return [each.what for each in needs(states, now)]


class ReleaseGauges(Collector):
    """Seconds until each role expires, for alerts on `/metrics`."""

    def __init__(self, repository: Repository, clock: Callable[[], datetime]) -> None:
        self._repository = repository
        self._clock = clock

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []  # nothing is read when the collector is registered

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "fedloop_release_role_seconds_left", "Until a role of the releases expires.", labels=["role"]
        )
        for each in self._repository.state():
            family.add_metric([each.role], (each.expires - self._clock()).total_seconds())
        yield family
