"""Operator API: the round of a run that is open now, member by member."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row

from coordinator.api.deps import ServicesDep
from coordinator.context.services import Services
from coordinator.db import rounds
from coordinator.db import runs as rows

router = APIRouter(tags=["runs"])

MemberState = Literal[
    "selected", "training", "uploading", "accepted", "rejected", "declined", "expired", "cancelled"
]


class CohortMember(BaseModel):
    """A device of the cohort: what it does, or how its task ended and why.

    `received_bytes` of `expected_bytes` have arrived; both are 0 before its upload begins. `seconds`: from the start of the round
    to the end of its task.
    """

    device: str
    runtime: str
    state: MemberState
    reason: str | None
    message: str | None
    received_bytes: int
    expected_bytes: int
    seconds: float | None


class OpenRound(BaseModel):
    """A round that accepts updates, or that is being aggregated (`closed`).

    It closes with `wanted` accepted updates, or at the deadline, when with fewer than `min_updates` it changes nothing.
    """

    number: int
    state: str
    wanted: int
    min_updates: int
    started_at: datetime
    deadline_at: datetime
    members: list[CohortMember]


class OpenRoundAnswer(BaseModel):
    """`round`: null between rounds, and once the run has ended."""

    round: OpenRound | None = Field(description="The round in progress.")


@router.get("/runs/{run}/open-round")
def get_open_round(run: str, services: ServicesDep) -> OpenRoundAnswer:
    """The round in progress: who is selected, trains, uploads, or has ended, and why."""

    def read(connection: Connection) -> OpenRoundAnswer:
        row = rows.require(connection, run)
        found = rounds.find_round(connection, run, row.round + 1)
        if row.state not in rows.LIVE or found is None or found.state not in ("open", "closed"):
            return OpenRoundAnswer(round=None)
        members = rounds.cohort(connection, run, found.number)
        return OpenRoundAnswer(
            round=OpenRound(
                number=found.number,
                state=found.state,
                wanted=found.wanted,
                min_updates=row.experiment["federation"]["min_updates"],
                started_at=found.started_at,
                deadline_at=found.deadline_at,
                members=[_member(services, each, found.started_at) for each in members],
            )
        )

    return services.database.read(read)


def _member(services: Services, task: Row[Any], started_at: datetime) -> CohortMember:
    arrived, announced = task.payload_bytes or 0, task.payload_bytes or task.size_bytes or 0
    state = task.state
    if state == "waiting":
        state = "selected"
    elif state == "leased":
        state = "uploading" if announced else "training"
        arrived = services.part_files.of(task.id).size_bytes if announced else 0
    return CohortMember(
        device=task.device,
        runtime=task.runtime,
        state=state,
        reason=task.reason,
        message=task.words,
        received_bytes=arrived,
        expected_bytes=announced,
        seconds=None if task.answered_at is None else (task.answered_at - started_at).total_seconds(),
    )
