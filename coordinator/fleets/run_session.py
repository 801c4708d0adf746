"""Database access and signal waits of one run's fleet: writes wait while disk or database fails, waits end on `stop`,
matching devices are invited to tasks, and a round that waits for devices reports it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar, get_args

import structlog
from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.context.stalls import StallLog
from coordinator.db import events, participants, privacy, rounds
from coordinator.rounds.fleet import Stopped
from coordinator.scheduling import matching
from coordinator.scheduling.deployments import Deployment, class_for
from coordinator.scheduling.matching import Candidate, Reason
from coordinator.scheduling.offers import Invitation
from coordinator.storage.errors import is_temporary
from edge_client.wire.device import RuntimeName, TaskKind

LONGEST_WAIT_SECONDS = 5.0
"""Longest wait before the clock is read again, because it may be set."""

_NOTICE_SECONDS = 2.0
"""Longest wait between two looks at the devices that a run waits for, and least time between two notices: a change is reported within
twice that, and the time that two looks take."""

_NUMBERS = re.compile(r"\d[\d.]*")

_MAX_NAMED, _MAX_COMPARED = 20, 1000
"""Devices that a notice names with their reasons, and those that are looked at."""

_RETRY_SECONDS = 2.0
"""Between attempts to write to a disk or database that fails temporarily."""

RUNTIMES: tuple[RuntimeName, ...] = get_args(RuntimeName)

T = TypeVar("T")

_log = structlog.get_logger("fedloop.runs")


class RunSession:
    """For the thread of one run; `stop` may be called from any thread."""

    def __init__(self, services: Services, run: str) -> None:
        self._services = services
        self._topic = f"run:{run}"
        self._stalls = StallLog(services, run)
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ends all present and later waits with `Stopped`."""
        self._stop.set()
        self._services.signals.notify(self._topic, "devices")

    def require_running(self) -> None:
        """Raises: Stopped: the run was stopped, or the process is ending."""
        if self._stop.is_set() or self._services.signals.closed:
            raise Stopped

    def read(self, work: Callable[[Connection], T]) -> T:
        return self._services.database.read(work)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Writes a transaction, with retries."""
        return self.retry(lambda: self._services.database.write(work).result())

    def retry(self, act: Callable[[], T]) -> T:
        """The result of `act`, retried while disk or database fails temporarily; the stall is reported."""
        while True:
            self.require_running()
            try:
                result = act()
            except Exception as error:
                if not is_temporary(error):
                    raise
                self._stalls.report(error)
            else:
                self._stalls.clear()
                return result
            self._stop.wait(_RETRY_SECONDS)

    def seen(self) -> int:
        """The counter of the run's topic, for `wait`."""
        return self._services.signals.seen(self._topic)

    def wait(self, seen: int, left: timedelta) -> None:
        """Waits for a signal to the run, at most as long as is `left`."""
        seconds = min(max(left.total_seconds(), 0.01), LONGEST_WAIT_SECONDS)
        self._services.signals.wait(self._topic, seen, seconds)

    def wait_for_devices(self, seen: int, seconds: float, pause_seconds: float) -> None:
        """Waits for a check-in of any device, at least `pause_seconds`, and never longer than a notice may take."""
        longest = min(seconds, _NOTICE_SECONDS)
        pause = min(longest, pause_seconds)
        self._services.signals.wait(self._topic, self.seen(), pause)
        self._services.signals.wait("devices", seen, longest - pause)

    def notify(self, devices: Iterable[str]) -> None:
        """Wakes these devices and the event streams."""
        self._services.signals.notify("events", *(f"device:{device}" for device in devices))


def wait_for_answers(
    services: Services, session: RunSession, run: str, number: int, kind: TaskKind, deadline_at: datetime
) -> None:
    """Waits until every task of this kind and number is answered, given up, or past the deadline."""
    while True:
        session.require_running()
        seen, now = session.seen(), services.clock()
        until = session.read(lambda at: rounds.next_expiry(at, run, number, kind))
        if until is None:
            return
        if now > deadline_at:
            session.notify(session.write(partial(_end_late, run=run, number=number, kind=kind, now=now)))
        elif until < now:
            session.notify(
                session.write(partial(rounds.expire_leases, run=run, number=number, kind=kind, now=now))
            )
        else:
            session.wait(seen, min(until, deadline_at) - now)


def _end_late(connection: Connection, run: str, number: int, kind: TaskKind, now: datetime) -> list[str]:
    message = "the round is over"
    return rounds.end_live_tasks(
        connection, run, number, kind, "expired", now, reason="deadline", message=message
    )


class WaitNotice:
    """Decides when to record the notice: immediately, and when the devices that can take part or the reasons why others cannot
    change, some seconds apart."""

    def __init__(self, services: Services, deployment: Deployment, number: int, wanted: int) -> None:
        self._services = services
        self._deployment = deployment
        self._number = number
        self._wanted = wanted
        self._last: tuple[int, tuple[Blocked, ...], float] | None = None

    def is_due(self, eligible: int, blocked: Sequence[Blocked], moment: float) -> bool:
        """Whether to record these devices now; if so, they count as recorded."""
        if self._last is not None:
            before, reasons, since = self._last
            is_same = eligible == before and _without_numbers(blocked) == _without_numbers(reasons)
            if is_same or moment - since < _NOTICE_SECONDS:
                return False
        self._last = (eligible, tuple(blocked), moment)
        return True

    def record(self, connection: Connection, seconds: float) -> None:
        """Writes the event and the line in the log."""
        assert self._last is not None
        eligible, blocked, _ = self._last
        values: dict[str, Any] = {
            "round": self._number,
            "eligible": eligible,
            "wanted": self._wanted,
            "least": self._deployment.quorum,
            "enrolled": participants.fleet_size(connection, self._deployment.project),
            "seconds": round(seconds),
        }
        run = self._deployment.run
        named = blocked_json(blocked)
        events.record(connection, self._services.clock(), "round_waiting", run=run, **values, **named)
        _log.info("round_waiting", run=run, **values)


@dataclass(frozen=True)
class Blocked:
    """A device that cannot take part in a run, and why."""

    device: str
    name: str
    reasons: tuple[Reason, ...]


def find_blocked(connection: Connection, deployment: Deployment, now: datetime) -> list[Blocked]:
    """The enrolled devices that get no task of this run now; of a fleet of more than a thousand, those among the first."""
    found = (
        Blocked(each.id, each.name, matching.blocking_reasons(each, deployment, now))
        for each in participants.enrolled(connection, _MAX_COMPARED, project=deployment.project)
    )
    return [each for each in found if each.reasons]


def blocked_json(blocked: Sequence[Blocked]) -> dict[str, Any]:
    """What an event says of them: the first ones with their reasons, and how many more there are."""
    named = [
        {"device": each.device, "name": each.name, "reasons": [reason.message for reason in each.reasons]}
        for each in blocked[:_MAX_NAMED]
    ]
    return {"blocked": named, "unnamed": len(blocked) - len(named)}


def _without_numbers(blocked: Sequence[Blocked]) -> list[tuple[str, tuple[str, ...]]]:
    """Devices and reasons to compare: that a load or an age is another number is not worth a notice."""
    return [
        (each.device, tuple(_NUMBERS.sub("", reason.message) for reason in each.reasons)) for each in blocked
    ]


def invite_eligible(
    candidates: Iterable[Candidate], deployment: Deployment, kind: TaskKind, now: datetime, lease: timedelta
) -> dict[str, Invitation]:
    """Invitations of those candidates that may get a task of this run now, by device."""
    invitations: dict[str, Invitation] = {}
    for device in candidates:
        if device.report is None or matching.blocking_reasons(device, deployment, now, kind):
            continue
        runtime = matching.runtime_for(device.report, deployment)
        if kind == "statistics":
            runtime = runtime or next(
                (name for name in RUNTIMES if name in device.report.runtimes), RUNTIMES[0]
            )
        if runtime is not None:
            model_class = _class_of(deployment, device.report.memory_bytes)
            until = _fetch_until(device, now, lease)
            invitations[device.id] = Invitation(runtime, until, model_class, device.relay)
    return invitations


def find_awake(
    deployment: Deployment, number: int, invitations: Mapping[str, Invitation], connection: Connection
) -> tuple[list[str], int]:
    """The devices that a round may take, those of a relay side by side, and how few of them it begins with at least.

    A device that took part too recently rests. If any does, a round may begin with none.
    """
    resting: set[str] = set()
    if deployment.minimum_separation > 1:
        resting = privacy.resting(connection, deployment.run, number, deployment.minimum_separation)
    awake = sorted(invitations.keys() - resting, key=lambda device: (invitations[device].relay or "", device))
    return awake, 0 if len(awake) < len(invitations) else deployment.quorum


def has_enough_relays(deployment: Deployment, invitations: Iterable[Invitation]) -> bool:
    """Whether the devices that can take part belong to as many relays as the run has."""
    relaying = deployment.relaying
    return relaying is None or len({each.relay for each in invitations}) >= relaying.relays


def invite(
    connection: Connection, deployment: Deployment, devices: Sequence[str], now: datetime, lease: timedelta
) -> dict[str, Invitation]:
    """Invitations of these devices. One that is no longer eligible is invited too, and declines."""
    invitations: dict[str, Invitation] = {}
    for device in devices:
        candidate = participants.candidate(connection, device)
        runtime = candidate and candidate.report and matching.runtime_for(candidate.report, deployment)
        until = _fetch_until(candidate, now, lease) if candidate else now + lease
        memory = candidate.report.memory_bytes if candidate and candidate.report else 0
        model_class = _class_of(deployment, memory)
        relay = candidate.relay if candidate else None
        invitations[device] = Invitation(runtime or deployment.runtimes[0], until, model_class, relay)
    return invitations


def _class_of(deployment: Deployment, memory_bytes: int) -> str:
    """The model class of a device, the least one if it has the memory of none; empty: the run has no classes."""
    if not deployment.classes:
        return ""
    return (class_for(deployment.classes, memory_bytes) or deployment.classes[-1]).name


def _fetch_until(device: Candidate, now: datetime, lease: timedelta) -> datetime:
    """At least a lease from now; later if the device's next check-in is due later."""
    return max(now + lease, (device.expected_at or now) + matching.OVERDUE_AFTER)
