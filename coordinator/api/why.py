"""Why a device takes part in each run, or does not: `fedloop device why`.

A device that does not match is told so in the words that kept it from being chosen; where it matches, the rows of
its tasks and of the rounds say what became of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy import Connection

from coordinator.api.deps import Serving
from coordinator.db import participants, rounds, standing
from coordinator.db.rounds import TaskRow
from coordinator.db.standing import LastRound, RunRow
from coordinator.db.tables import LIVE_RUNS
from coordinator.errors import Refusal
from coordinator.fleets import matching
from coordinator.fleets.deployments import Deployment
from coordinator.fleets.matching import Candidate
from coordinator.services import Services

FINISHED_RUNS = 3
"""How many runs that are over are told of."""

router = APIRouter()


class WhyReason(BaseModel):
    """A stable code, and words for a person."""

    code: str
    words: str


class WhyRun(BaseModel):
    """Where a device stands in one run. `matches`: it may be chosen; None for runs that are not under way."""

    run: str
    name: str
    state: str
    matches: bool | None
    reasons: list[WhyReason]


class Why(BaseModel):
    """`reasons` keep the device from every run; `runs` are the live ones and the last few, the newest first."""

    device: str
    name: str
    state: str
    reasons: list[WhyReason]
    runs: list[WhyRun]


@router.get("/devices/{device}/why")
def device_why(
    device: str,
    services: Serving,
    run: Annotated[str | None, Query(description="Only this run.")] = None,
) -> Why:
    """Why this device takes part, or does not."""
    return services.database.read(lambda connection: _why(connection, services, device, run))


def _why(connection: Connection, services: Services, device: str, run: str | None) -> Why:
    now = services.clock()
    found = participants.candidate(connection, device)
    if found is None:
        raise Refusal(
            404, "not_found", f"there is no device {device[:100]!r}; `fedloop device list` shows all"
        )
    known = standing.runs_to_tell_of(connection, FINISHED_RUNS, only=run)
    if run is not None and not known:
        raise Refusal(404, "not_found", f"there is no run {run[:100]!r}")
    live = {deployment.run: deployment for deployment in services.deployments.active()}
    return Why(
        device=found.id,
        name=found.name,
        state=found.state,
        reasons=[_told(reason.code, reason.words) for reason in matching.why_absent(found, now)],
        runs=[_in_run(connection, found, each, live.get(each.id), now) for each in known],
    )


def _in_run(
    connection: Connection, device: Candidate, run: RunRow, deployment: Deployment | None, now: datetime
) -> WhyRun:
    kept_out = matching.why_not(device, deployment, now) if deployment is not None else ()
    latest = standing.last_round(connection, run.id)
    task = rounds.last_task(connection, run.id, device.id)
    reasons = [_told(reason.code, reason.words) for reason in kept_out]
    reasons += [_told(code, words) for code, words in _history(run, latest, task, kept_out=bool(kept_out))]
    return WhyRun(
        run=run.id,
        name=run.name,
        state=run.state,
        matches=not kept_out if deployment is not None else None,
        reasons=reasons,
    )


def _history(
    run: RunRow, latest: LastRound | None, task: TaskRow | None, *, kept_out: bool
) -> Iterator[tuple[str, str]]:
    """What became of the device in this run, the latest first."""
    live = run.state in LIVE_RUNS
    if latest is None:
        if live and not kept_out:
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
    asked_now = task is not None and task.round == latest.number
    if not asked_now and not kept_out:
        yield (
            "not_chosen",
            f"not chosen in round {latest.number}: the cohort had {latest.cohort} of {latest.population} devices",
        )
    if task is not None:
        yield _outcome(task)
    elif kept_out or not live:
        yield "never_asked", "no round of this run asked it"


def _outcome(task: TaskRow) -> tuple[str, str]:
    """The code and words of its latest task."""
    words = f": {task.words}" if task.words else ""
    told = {
        "waiting": ("asked", f"chosen in round {task.round}; its task waits for its next check-in"),
        "leased": ("training", f"it works on round {task.round}{_until(task.leased_until)}"),
        "accepted": ("accepted", f"its update of round {task.round} was accepted{_at(task.answered_at)}"),
        "rejected": ("rejected", f"its update of round {task.round} was rejected{words}"),
        "declined": ("declined", f"it declined round {task.round}{words}"),
        "cancelled": ("cancelled", f"round {task.round} was over before it answered"),
    }
    if task.state in told:
        return told[task.state]
    if task.reason == "deadline":
        return "too_late", f"it had not answered by the deadline of round {task.round}"
    return "lease_expired", f"given up in round {task.round}{words}"


def _at(moment: datetime | None) -> str:
    return f" at {moment:%Y-%m-%d %H:%M:%S} UTC" if moment is not None else ""


def _until(moment: datetime | None) -> str:
    return f"; it must be heard of by {moment:%H:%M:%S} UTC" if moment is not None else ""


def _told(code: str, words: str) -> WhyReason:
    return WhyReason(code=code, words=words)
