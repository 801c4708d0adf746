"""Answers small enough for one message: the figures of an evaluation, or a declined task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from coordinator.context.services import Services, ServicesDep
from coordinator.db import answers
from coordinator.device_api.bodies import read_message
from coordinator.device_api.identity import CallerDep
from coordinator.device_api.tasks import own_task, require_open
from coordinator.errors import Refusal
from edge_client.wire.arrays import LARGEST_COUNT
from edge_client.wire.device import Decline, EvaluationResult, to_json

router = APIRouter()


@router.post("/tasks/{task}/evaluation")
async def evaluation(
    task: str, request: Request, caller: CallerDep, services: ServicesDep
) -> Mapping[str, Any]:
    """Idempotent: a repeated message gets the same answer and counts once."""
    message = await read_message(EvaluationResult, request)
    _require_valid_figures(message)

    def work(connection: Connection) -> str | None:
        row = own_task(connection, caller.id, task, "evaluate")
        if row.state == "accepted":
            return None
        now = services.clock()
        require_open(row, now)
        if message.base != row.offer["params"]["sha256"]:
            raise Refusal(
                422, "stale_base", f"it evaluated model {message.base[:12]}, expected the model of its task"
            )
        answers.record_evaluation(connection, row, to_json(message), now)
        return row.run

    return await _record(services, work)


@router.post("/tasks/{task}/decline")
async def decline(task: str, request: Request, caller: CallerDep, services: ServicesDep) -> Mapping[str, Any]:
    """Idempotent; no effect on a task that is over."""
    message = await read_message(Decline, request)

    def work(connection: Connection) -> str | None:
        row = own_task(connection, caller.id, task)
        if row.state not in ("waiting", "leased"):
            return None
        answers.decline(connection, row, message.code, message.words, services.clock())
        return row.run

    return await _record(services, work)


async def _record(services: Services, work: Callable[[Connection], str | None]) -> Mapping[str, Any]:
    """Does the `work`, and notifies the run that it returns."""
    run = await services.write(work)
    if run is not None:
        services.signals.notify(f"run:{run}", "events")
    return {"accepted": True}


def _require_valid_figures(message: EvaluationResult) -> None:
    """Checks the ranges of the figures; the wire has checked that they are finite numbers."""
    checks = (
        (1 <= message.rows <= LARGEST_COUNT, f"rows is {message.rows}, expected 1 or more"),
        (1 <= message.labels <= LARGEST_COUNT, f"labels is {message.labels}, expected 1 or more"),
        (0 <= message.correct <= message.labels, f"correct is {message.correct} of {message.labels} labels"),
        (message.loss_sum >= 0, f"loss_sum is {message.loss_sum}, expected 0 or more"),
    )
    for holds, problem in checks:
        if not holds:
            raise Refusal(422, "malformed", f"EvaluationResult.{problem[:200]}")
