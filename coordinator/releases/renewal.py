"""Keeping the repository fresh: online metadata is signed anew before half of its life is over; people are told in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.releases.repository import Repository, RoleState

EVERY_SECONDS = 600.0
TELL_BEFORE = timedelta(days=30)

_log = structlog.get_logger("fedloop.releases")


async def keep_fresh(repository: Repository, clock: Callable[[], datetime]) -> None:
    """Renews at once, and then for ever; a failure is logged and tried again."""
    told: list[str] = []
    while True:
        try:
            renewed = await asyncio.to_thread(repository.renew, clock())
            states = await asyncio.to_thread(repository.state)
        except Exception:  # a full disk, or a file that somebody broke: the coordinator serves on
            _log.exception("releases_not_renewed")
        else:
            if renewed:
                _log.info("releases_renewed", roles=renewed)
            words = warnings(states, clock())
            for each in words:
                if each not in told:
                    _log.warning("releases_need_signatures", what=each)
            told = words
        await asyncio.sleep(EVERY_SECONDS)


def warnings(states: Sequence[RoleState], now: datetime) -> list[str]:
    """One sentence for each role that people must sign anew soon, or that devices refuse now."""
    found = []
    for each in states:
        until = f"{each.expires:%Y-%m-%d %H:%M} UTC"
        if each.offline and not each.is_valid:
            why = f"expired at {until}" if now >= each.expires else "is not signed as the root asks"
            found.append(f"{each.role} {each.version} {why}: devices install nothing until it is signed anew")
        elif each.offline and each.expires - now < TELL_BEFORE:
            found.append(f"{each.role} {each.version} expires at {until}: sign it anew before")
        elif not each.is_valid:
            found.append(
                f"{each.role} {each.version} is not valid: the coordinator did not renew it; see its log"
            )
    return found


class ReleaseGauges(Collector):
    """For `/metrics`: when each role expires, to be warned by before it does."""

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
