"""Check-in: a device says what it is and can, and hears what to do.

1. agree on a version of the wire
2. keep the report, and how releases stand; renew the lease of what it works on, or lease it a task that waits
3. a device that matches a live run is held until there is something for it; others are told a time
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection

from coordinator.api.deps import Serving
from coordinator.db import answers, participants, rounds
from coordinator.db.rounds import TaskRow
from coordinator.device_api.bodies import message_of
from coordinator.device_api.identity import Caller, Calling
from coordinator.errors import Refusal
from coordinator.fleets import matching, offers
from coordinator.rollouts import engine, plan, reports
from coordinator.rollouts.reports import Heard
from coordinator.services import Services
from edge_client.wire.device import (
    OLDEST_MINOR,
    WIRE,
    CheckIn,
    CheckInAnswer,
    TaskOffer,
    negotiated,
    to_json,
    version,
)

LONGEST_HOLD_SECONDS = 50.0

router = APIRouter()


@dataclass(frozen=True)
class _Found:
    """What the rows have for a device: a task to start, or that the one it works on is not wanted.

    `declined`: runs whose tasks ended, because the device's owner opted out of them. `releases`: what it is to run.
    """

    offer: TaskOffer | None = None
    stop: bool = False
    worth_holding: bool = False
    declined: tuple[str, ...] = ()
    releases: Heard = field(default_factory=Heard)


@router.post("/checkin")
async def check_in(
    request: Request,
    caller: Calling,
    services: Serving,
) -> Mapping[str, Any]:
    said = await message_of(CheckIn, request)
    wire = _agreed(said.wire)
    _require_sound(said)
    topic = f"device:{caller.id}"
    pace = await run_in_threadpool(_pace, services)
    hold_seconds = min(max(said.wait_seconds, 0.0), LONGEST_HOLD_SECONDS)

    seen = services.signals.seen(topic)
    due_seconds = max(hold_seconds, pace)
    found = await _written(services, lambda at: _record(at, services, caller, said, due_seconds))
    services.signals.notify("devices")
    _tell(services, caller, said, found)
    if not found.worth_holding:
        return _answer(wire, 0.0 if found.stop else pace, found)
    if found.releases.is_new:
        return _answer(wire, 0.0, found, hold=True)
    with services.pacing.room(services.settings.held, caller.id) as held:
        if held and await _arrives(request, services, topic, seen, hold_seconds):
            found = await _written(services, lambda at: _look(at, services, caller, said))
            _tell(services, caller, said, found)
    again = 0.0 if held and hold_seconds > 0 else pace
    return _answer(wire, again, found, hold=held and found.worth_holding)


def _answer(wire: str, next_seconds: float, found: _Found, *, hold: bool = False) -> Mapping[str, Any]:
    return to_json(
        CheckInAnswer(wire, next_seconds, found.offer, found.stop, hold=hold, releases=found.releases.offers)
    )


def _agreed(theirs: str) -> str:
    try:
        agreed = negotiated(version(theirs))
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


def _require_sound(said: CheckIn) -> None:
    try:
        engine.require_sound(said.releases)
    except ValueError as error:
        raise Refusal(422, "malformed", f"CheckIn.releases: {error}") from None


def _record(
    connection: Connection, services: Services, caller: Caller, said: CheckIn, due_seconds: float
) -> _Found:
    """Keeps the report, then looks what there is for the device."""
    now = services.clock()
    due = now + timedelta(seconds=due_seconds)
    participants.checked_in(connection, caller.id, to_json(said), now, due)
    return _look(connection, services, caller, said)


def _look(connection: Connection, services: Services, caller: Caller, said: CheckIn) -> _Found:
    """The task to start or go on with, and the releases to run."""
    found = _task(connection, services, caller, said)
    if not plan.knows_releases(said.wire):
        return found
    return replace(found, releases=reports.check_in(connection, caller.id, said.releases, services.clock()))


def _task(connection: Connection, services: Services, caller: Caller, said: CheckIn) -> _Found:
    """The task to start or go on with; leases are given and renewed here."""
    now = services.clock()
    until = now + timedelta(seconds=services.settings.lease_seconds)
    live = rounds.live_tasks(connection, caller.id)
    rounds.wait_longer(connection, caller.id, until)
    if said.working_on is not None:
        held = next((task for task in live if task.id == said.working_on), None)
        if held is None or not _is_open(held):
            return _Found(stop=True)
        rounds.lease(connection, held.id, until)
        return _Found(worth_holding=True)
    declined: list[str] = []
    for task in live:
        if matching.is_out(said, task.run, task.offer["run_name"]):
            answers.decline(connection, task, "opted_out", "its owner opted out of this run", now)
            declined.append(task.run)
        elif _is_open(task) and not said.ineligible and matching.knows(said, task.kind):
            rounds.lease(connection, task.id, until)
            return _Found(offers.offer_now(task.offer, now), declined=tuple(declined))
    return _Found(worth_holding=_in_pool(connection, services, caller.id, now), declined=tuple(declined))


def _tell(services: Services, caller: Caller, said: CheckIn, found: _Found) -> None:
    """Wakes rollouts that may go on and runs that lost a task; logs the device where it stands otherwise than before."""
    if found.releases.changed:
        services.signals.notify(reports.TOPIC, "events")
    if found.declined:
        services.signals.notify("events", *(f"run:{run}" for run in found.declined))
    if found.stop:
        state, task = "stopped", said.working_on
    elif found.offer is not None:
        state, task = "given_task", found.offer.task
    elif said.working_on is not None:
        state, task = "working", said.working_on
    else:
        state, task = ("ineligible" if said.ineligible else "held" if found.worth_holding else "idle"), None
    services.ticks.tell(caller.id, state, task=task, ineligible=list(said.ineligible))


def _is_open(task: TaskRow) -> bool:
    return task.kind == "evaluate" or task.round_state == "open"


def _in_pool(connection: Connection, services: Services, device: str, now: datetime) -> bool:
    """Whether the device may be chosen by a live run, so that it is worth holding."""
    found = participants.candidate(connection, device)
    return found is not None and any(
        not matching.why_not(found, deployment, now) for deployment in services.deployments.active()
    )


def _pace(services: Services) -> float:
    """Seconds until a device that is not held comes back."""
    return services.pacing.next_seconds(
        lambda: services.database.read(participants.fleet_size), services.settings.checkins_per_second
    )


async def _written(services: Services, work: Callable[[Connection], _Found]) -> _Found:
    return await asyncio.wrap_future(services.database.write(work))


async def _arrives(request: Request, services: Services, topic: str, seen: int, hold_seconds: float) -> bool:
    """Waits for a signal to the device; ends early when the device hangs up."""
    signal = asyncio.ensure_future(services.signals.arrive(topic, seen, hold_seconds))
    hang_up = asyncio.ensure_future(_hangs_up(request))
    try:
        await asyncio.wait({signal, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        return signal.done() and signal.result()
    finally:
        signal.cancel()
        hang_up.cancel()


async def _hangs_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
