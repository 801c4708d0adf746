"""Check-in: a device reports its state and capabilities, and receives what to do.

1. negotiate the wire version
2. store the report and the state of releases; renew the lease of the current task, or lease a waiting one
3. hold a device that matches a live run until there is work for it; tell others when to come back
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection

from coordinator.context.services import Services, ServicesDep
from coordinator.db import answers, participants, rounds
from coordinator.device_api.identity import CallerDep
from coordinator.errors import Refusal
from coordinator.limits.request_bodies import read_message
from coordinator.rollouts import engine, plan, reports
from coordinator.rollouts.reports import ReleaseOffers
from coordinator.scheduling import matching, offers
from edge_client.wire.device import (
    OLDEST_MINOR,
    WIRE,
    CheckIn,
    CheckInAnswer,
    TaskOffer,
    beat_seconds,
    negotiate,
    supports,
    to_json,
    version,
)

LONGEST_HOLD_SECONDS = 50.0
_RETURN_SECONDS = 5.0
"""How soon a device checks in again after a long poll, whether that was answered or its connection broke."""

router = APIRouter()


@dataclass(frozen=True)
class _Outcome:
    """What a device must do: start the task of `offer`, or stop its current one.

    `declined`: runs whose tasks ended because the device's owner opted out. `releases`: the releases to run.
    """

    offer: TaskOffer | None = None
    stop: bool = False
    worth_holding: bool = False
    declined: tuple[str, ...] = ()
    releases: ReleaseOffers = field(default_factory=ReleaseOffers)


@router.post("/checkin")
async def check_in(request: Request, caller: CallerDep, services: ServicesDep) -> Mapping[str, Any]:
    report = await read_message(CheckIn, request)
    wire = _negotiate(report.wire)
    _require_valid_releases(report)
    topic = f"device:{caller}"
    idle_seconds = await run_in_threadpool(_idle_seconds, services)
    hold_seconds = min(max(report.wait_seconds, 0.0), LONGEST_HOLD_SECONDS)

    seen = services.signals.seen(topic)
    now = services.clock()
    outcome = await services.write(
        lambda at: _record(at, services, caller, report, now, hold_seconds, idle_seconds)
    )
    services.signals.notify("devices")
    _notify(services, caller, report, outcome)
    if not outcome.worth_holding:
        return _answer(wire, 0.0 if outcome.stop else idle_seconds, outcome)
    if outcome.releases.is_new:
        return _answer(wire, 0.0, outcome, hold=True)
    with services.pacing.poll_slot(services.settings.held, caller) as held:
        ended = await _wait_for_signal(request, services, topic, seen, hold_seconds) if held else "no_room"
        if ended == "signal":
            outcome = await services.write(lambda at: _find_late_work(at, services, caller, report, now))
            _notify(services, caller, report, outcome)
        elif ended != "time":
            # A device whose poll broke off is back soon or gone: it must not count as online until the poll would have ended.
            told_seconds = max(idle_seconds, _due_seconds(services, report, outcome, 0.0))
            seconds = _RETURN_SECONDS if ended == "disconnect" else told_seconds
            await services.write(lambda at: _expect(at, services, caller, now, seconds))
    next_seconds = 0.0 if held and hold_seconds > 0 else idle_seconds
    return _answer(wire, next_seconds, outcome, hold=held and outcome.worth_holding)


def _answer(wire: str, next_seconds: float, outcome: _Outcome, *, hold: bool = False) -> Mapping[str, Any]:
    return to_json(
        CheckInAnswer(
            wire, next_seconds, outcome.offer, outcome.stop, hold=hold, releases=outcome.releases.offers
        )
    )


def _negotiate(theirs: str) -> str:
    try:
        agreed = negotiate(version(theirs))
    except ValueError as error:
        raise Refusal(422, "malformed", f"CheckIn.wire: {error}") from None
    if agreed is None:
        raise Refusal(
            426,
            "wire_version",
            f"this device speaks wire {theirs}, the coordinator {WIRE[0]}.{OLDEST_MINOR} to "
            f"{WIRE[0]}.{WIRE[1]}; update the older of the two",
            oldest=f"{WIRE[0]}.{OLDEST_MINOR}",
            newest=f"{WIRE[0]}.{WIRE[1]}",
        )
    return f"{agreed[0]}.{agreed[1]}"


def _require_valid_releases(report: CheckIn) -> None:
    try:
        engine.require_valid_reports(report.releases)
    except ValueError as error:
        raise Refusal(422, "malformed", f"CheckIn.releases: {error}") from None


def _record(
    connection: Connection,
    services: Services,
    caller: str,
    report: CheckIn,
    now: datetime,
    hold_seconds: float,
    idle_seconds: float,
) -> _Outcome:
    due = now + timedelta(seconds=idle_seconds)
    participants.checked_in(connection, caller, to_json(report), now, due)
    outcome = _find_work(connection, services, caller, report)
    due_seconds = _due_seconds(services, report, outcome, hold_seconds)
    if due_seconds > idle_seconds:
        _expect(connection, services, caller, now, due_seconds)
    return outcome


def _due_seconds(services: Services, report: CheckIn, outcome: _Outcome, hold_seconds: float) -> float:
    """When the device checks in next if it is at work or held; 0 if it is told a time."""
    if outcome.offer is not None or (report.working_on is not None and not outcome.stop):
        return beat_seconds(services.settings.lease_seconds) + _RETURN_SECONDS
    return hold_seconds + _RETURN_SECONDS if outcome.worth_holding and hold_seconds else 0.0


def _find_late_work(
    connection: Connection, services: Services, caller: str, report: CheckIn, seen_at: datetime
) -> _Outcome:
    """What a device that has been held since `seen_at` must do."""
    outcome = _find_work(connection, services, caller, report)
    if due_seconds := _due_seconds(services, report, outcome, 0.0):
        _expect(connection, services, caller, seen_at, due_seconds)
    return outcome


def _expect(
    connection: Connection, services: Services, caller: str, seen_at: datetime, seconds: float
) -> None:
    due = services.clock() + timedelta(seconds=seconds)
    participants.expect(connection, caller, seen_at, due)


def _find_work(connection: Connection, services: Services, caller: str, report: CheckIn) -> _Outcome:
    outcome = _next_task(connection, services, caller, report)
    if not plan.supports_releases(report.wire):
        return outcome
    return replace(outcome, releases=reports.check_in(connection, caller, report.releases, services.clock()))


def _next_task(connection: Connection, services: Services, caller: str, report: CheckIn) -> _Outcome:
    """The task to start or continue; grants and renews leases."""
    now = services.clock()
    until = now + timedelta(seconds=services.settings.lease_seconds)
    live = rounds.live_tasks(connection, caller)
    rounds.extend_waiting(connection, caller, until)
    if report.working_on is not None:
        held = next((task for task in live if task.id == report.working_on), None)
        if held is None or not held.is_open:
            return _Outcome(stop=True)
        rounds.lease(connection, held.id, until)
        return _Outcome(worth_holding=True)
    declined: list[str] = []
    for task in live:
        if matching.has_opted_out(report, task.run, task.offer["run_name"]):
            answers.decline(connection, task, rounds.OPTED_OUT, "its owner opted out of this run", now)
            declined.append(task.run)
        elif (
            task.is_open
            and not report.ineligible
            and supports(report.wire, matching.MIN_WIRE_VERSION[task.kind])
        ):
            rounds.lease(connection, task.id, until)
            return _Outcome(offers.current_offer(task.offer, now), declined=tuple(declined))
    return _Outcome(
        worth_holding=_may_be_selected(connection, services, caller, now), declined=tuple(declined)
    )


def _notify(services: Services, caller: str, report: CheckIn, outcome: _Outcome) -> None:
    """Wakes rollouts that may advance and runs that lost a task; logs the device if its state changed."""
    if outcome.releases.changed:
        services.signals.notify(reports.TOPIC, "events")
    if outcome.declined:
        services.signals.notify("events", *(f"run:{run}" for run in outcome.declined))
    if outcome.stop:
        state, task = "stopped", report.working_on
    elif outcome.offer is not None:
        state, task = "given_task", outcome.offer.task
    elif report.working_on is not None:
        state, task = "working", report.working_on
    else:
        state, task = (
            ("ineligible" if report.ineligible else "held" if outcome.worth_holding else "idle"),
            None,
        )
    services.device_log.log(caller, state, task=task, ineligible=list(report.ineligible))


def _may_be_selected(connection: Connection, services: Services, device: str, now: datetime) -> bool:
    """Whether a live run may select the device, so that it is worth holding; of a relay, whether it may have something to fold."""
    candidate = participants.candidate(connection, device)
    if candidate is not None and candidate.relay_names is not None:
        return any(
            each.relaying is not None and each.project == candidate.project
            for each in services.deployments.active()
        )
    return candidate is not None and any(
        not matching.blocking_reasons(candidate, deployment, now)
        for deployment in services.deployments.active()
    )


def _idle_seconds(services: Services) -> float:
    return services.pacing.next_seconds(
        lambda: services.database.read(participants.fleet_size), services.settings.checkins_per_second
    )


async def _wait_for_signal(
    request: Request, services: Services, topic: str, seen: int, hold_seconds: float
) -> Literal["signal", "time", "disconnect"]:
    """Waits for a signal to the device; returns what ended the wait."""
    signal = asyncio.ensure_future(services.signals.wait_async(topic, seen, hold_seconds))
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({signal, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if signal.done():
            return "signal" if signal.result() else "time"
        return "disconnect"
    finally:
        signal.cancel()
        disconnect.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
