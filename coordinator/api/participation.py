"""Operator API: why a device takes part in each run (`fedloop device why`), and each device in a run (`fedloop runs show`).

For a device that does not match a run, the answer is the reason of the matching; for one that matches, it follows from
the rows of its tasks and of the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row

from coordinator.api.deps import ServicesDep
from coordinator.context.services import Services
from coordinator.db import participants, rounds
from coordinator.db import runs as run_rows
from coordinator.db.rounds import TaskRow
from coordinator.db.runs import LastRound
from coordinator.db.tables import LIVE_RUNS
from coordinator.errors import Refusal
from coordinator.scheduling import matching
from coordinator.scheduling.deployments import Deployment, class_for
from coordinator.scheduling.matching import Candidate

ENDED_RUNS = 3
"""Number of ended runs in the answer."""

router = APIRouter()


class WhyReason(BaseModel):
    """A stable code, and a message for people."""

    code: str
    words: str


class WhyRun(BaseModel):
    """A device's part in one run. `matches`: it may be selected; None for runs that are not in progress."""

    run: str
    name: str
    state: str
    matches: bool | None
    reasons: list[WhyReason]


class Why(BaseModel):
    """`reasons` exclude the device from every run; `runs` are the live ones and the last few, newest first."""

    device: str
    name: str
    state: str
    reasons: list[WhyReason]
    runs: list[WhyRun]


class RunDevice(BaseModel):
    """A device's part in one run. `matches`: it may be selected; None if the run is not in progress."""

    device: str
    name: str
    matches: bool | None
    reasons: list[WhyReason]


class RunDevices(BaseModel):
    """A page of the enrolled devices, by id."""

    devices: list[RunDevice]
    next: str | None = Field(description="`after` for the next page; null on the last one.")


@router.get("/runs/{run}/devices")
def list_run_devices(
    run: str,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(pattern="^[^\\x00]*$", description="Only ids after this one.")] = "",
) -> RunDevices:
    """What each enrolled device does in this run, or why it does not take part."""

    def read(connection: Connection) -> RunDevices:
        row, now = run_rows.require(connection, run), services.clock()
        live = {each.run: each for each in services.deployments.active()}
        found = participants.enrolled(connection, limit + 1, after, project=row.project)
        page = [_explain_device(connection, each, row, live.get(run), now) for each in found[:limit]]
        return RunDevices(devices=page, next=page[-1].device if len(found) > limit else None)

    return services.database.read(read)


def _explain_device(
    connection: Connection, device: Candidate, run: Row[Any], deployment: Deployment | None, now: datetime
) -> RunDevice:
    part = _explain_run(connection, device, run, deployment, now)
    return RunDevice(device=device.id, name=device.name, matches=part.matches, reasons=part.reasons)


@router.get("/devices/{device}/why")
def device_why(
    device: str, services: ServicesDep, run: Annotated[str | None, Query(description="Only this run.")] = None
) -> Why:
    """Why this device takes part, or does not."""
    return services.database.read(lambda connection: _explain(connection, services, device, run))


def _explain(connection: Connection, services: Services, device: str, run: str | None) -> Why:
    now = services.clock()
    candidate = participants.candidate(connection, device)
    if candidate is None:
        raise Refusal(
            404, "not_found", f"there is no device {device[:100]!r}; `fedloop device list` shows all"
        )
    runs = run_rows.recent_runs(connection, ENDED_RUNS, only=run)
    if run is not None and not runs:
        raise Refusal(404, "not_found", f"there is no run {run[:100]!r}")
    live = {deployment.run: deployment for deployment in services.deployments.active()}
    return Why(
        device=candidate.id,
        name=candidate.name,
        state=candidate.state,
        reasons=[
            WhyReason(code=each.code, words=each.message) for each in matching.absence_reasons(candidate, now)
        ],
        runs=[_explain_run(connection, candidate, each, live.get(each.id), now) for each in runs],
    )


def _explain_run(
    connection: Connection, device: Candidate, run: Row[Any], deployment: Deployment | None, now: datetime
) -> WhyRun:
    blocking = matching.blocking_reasons(device, deployment, now) if deployment is not None else ()
    latest = run_rows.last_round(connection, run.id)
    task = rounds.last_task(connection, run.id, device.id)
    history = _history(run, latest, task, is_blocked=bool(blocking))
    found = [
        *((each.code, each.message) for each in blocking),
        *_model_class(device, deployment, task),
        *history,
    ]
    return WhyRun(
        run=run.id,
        name=run.name,
        state=run.state,
        matches=not blocking if deployment is not None else None,
        reasons=[WhyReason(code=code, words=message) for code, message in found],
    )


def _model_class(
    device: Candidate, deployment: Deployment | None, task: TaskRow | None
) -> Iterator[tuple[str, str]]:
    """The model class that the device is in now, or that it had when the run ended."""
    if deployment is None or device.report is None:
        if task is not None and (name := task.offer.get("model_class")):
            yield "model_class", f"model class {name}"
        return
    memory = device.report.memory_bytes
    if (found := class_for(deployment.classes, memory)) is not None:
        yield (
            "model_class",
            f"model class {found.name}, which trains {found.width:g} of the model's width: it offers {memory / 2**20:.0f} MiB of memory",
        )


def _history(
    run: Row[Any], latest: LastRound | None, task: TaskRow | None, *, is_blocked: bool
) -> Iterator[tuple[str, str]]:
    live = run.state in LIVE_RUNS
    if latest is None:
        if live and not is_blocked:
            yield (
                "waiting",
                "the run has not begun its first round; it waits for devices or prepares its model",
            )
        elif not live:
            yield (
                "no_round",
                f"the run {run.state} before its first round" + (f": {run.error}" if run.error else ""),
            )
        return
    selected = task is not None and task.round == latest.number
    if not selected and not is_blocked:
        yield (
            "not_chosen",
            f"not selected in round {latest.number}: the cohort had {latest.cohort} of {latest.population} devices",
        )
    if task is not None:
        yield _outcome(task)
    elif is_blocked or not live:
        yield "never_asked", "no round of this run selected it"


def _outcome(task: TaskRow) -> tuple[str, str]:
    detail = f": {task.words}" if task.words else ""
    until = f"; it must check in by {task.leased_until:%H:%M:%S} UTC" if task.leased_until else ""
    at = f" at {task.answered_at:%Y-%m-%d %H:%M:%S} UTC" if task.answered_at else ""
    outcomes = {
        "waiting": ("asked", f"selected in round {task.round}; its task waits for its next check-in"),
        "leased": ("training", f"it works on round {task.round}{until}"),
        "accepted": ("accepted", f"its update of round {task.round} was accepted{at}"),
        "rejected": ("rejected", f"its update of round {task.round} was rejected{detail}"),
        "declined": ("declined", f"it declined round {task.round}{detail}"),
        "cancelled": ("cancelled", f"round {task.round} ended before it answered"),
    }
    if task.state in outcomes:
        return outcomes[task.state]
    if task.reason == "deadline":
        return "too_late", f"it did not answer by the deadline of round {task.round}"
    return "lease_expired", f"its task of round {task.round} expired{detail}"
