"""Answers small enough for one message: the figures of an evaluation, statistics, or a declined task.

Also the checks of every route that names a task: the caller owns it, and an answer to it is still accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from coordinator.context.services import Services, ServicesDep
from coordinator.db import answers, rounds, secure
from coordinator.db.rounds import TaskRow
from coordinator.device_api.identity import CallerDep
from coordinator.errors import Refusal
from coordinator.limits.request_bodies import read_message
from edge_client.wire import scores
from edge_client.wire.arrays import LARGEST_COUNT
from edge_client.wire.device import Decline, EvaluationResult, TaskKind, to_json
from edge_client.wire.statistics import StatisticsRequest, StatisticsResult, require_valid
from edge_client.wire.strict import InvalidDocument, parse_message

router = APIRouter()

_ROUNDING = 1 + 1e-6
"""How far sums of floats may be off."""


@router.post("/tasks/{task}/evaluation")
async def evaluation(
    task: str, request: Request, caller: CallerDep, services: ServicesDep
) -> Mapping[str, Any]:
    """Idempotent: a repeated message gets the same answer and counts once."""
    message = await read_message(EvaluationResult, request)
    _require_valid_figures(message)

    def work(connection: Connection) -> str | None:
        row = own_task(connection, caller, task, "evaluate")
        if row.state == "accepted":
            return None
        now = services.clock()
        require_open(row, now)
        if message.base != row.offer["params"]["sha256"]:
            raise Refusal(
                422, "stale_base", f"it evaluated model {message.base[:12]}, expected the model of its task"
            )
        _require_valid_scores(message, row.offer["model"])
        answers.record_evaluation(connection, row, to_json(message), now)
        return row.run

    return await record(services, work)


@router.post("/tasks/{task}/statistics")
async def statistics(
    task: str, request: Request, caller: CallerDep, services: ServicesDep
) -> Mapping[str, Any]:
    """Idempotent: a repeated message gets the same answer and counts once."""
    message = await read_message(StatisticsResult, request)

    def work(connection: Connection) -> str | None:
        row = own_task(connection, caller, task, "statistics")
        if row.state == "accepted":
            return None
        now = services.clock()
        require_open(row, now)
        try:
            require_valid(message, parse_message(StatisticsRequest, row.offer["message"], "request"))
        except InvalidDocument as error:
            raise Refusal(422, "malformed", str(error)) from None
        answers.record_statistics(connection, row, to_json(message), now)
        return row.run

    return await record(services, work)


@router.post("/tasks/{task}/decline")
async def decline(task: str, request: Request, caller: CallerDep, services: ServicesDep) -> Mapping[str, Any]:
    """Idempotent; no effect on a task that is over. After its masked update a device can leave the secure aggregation that goes on."""
    message = await read_message(Decline, request)

    def work(connection: Connection) -> str | None:
        row = own_task(connection, caller, task)
        if row.state == "accepted" and row.offer["message"].get("secure") is not None:
            secure.leave(connection, row.id, message.words)
            return row.run
        if row.state not in ("waiting", "leased"):
            return None
        answers.decline(connection, row, message.code, message.words, services.clock())
        return row.run

    return await record(services, work)


async def record(services: Services, work: Callable[[Connection], str | None]) -> Mapping[str, Any]:
    """Does the `work`, and notifies the run that it returns."""
    run = await services.write(work)
    if run is not None:
        services.signals.notify(f"run:{run}", "events")
    return {"accepted": True}


def _require_valid_figures(message: EvaluationResult) -> None:
    """Checks the ranges of the figures; the wire has checked that they are finite numbers.

    The sums of quantities are checked last: their bounds divide by `labels` and take the root of `loss_sum`.
    """
    checks = (
        (1 <= message.rows <= LARGEST_COUNT, f"rows is {message.rows}, expected 1 or more"),
        (1 <= message.labels <= LARGEST_COUNT, f"labels is {message.labels}, expected 1 or more"),
        (0 <= message.correct <= message.labels, f"correct is {message.correct} of {message.labels} labels"),
        (message.loss_sum >= 0, f"loss_sum is {message.loss_sum}, expected 0 or more"),
    )
    for holds, problem in chain(checks, _quantity_checks(message)):
        if not holds:
            raise Refusal(422, "malformed", f"EvaluationResult.{problem[:200]}")


def _require_valid_scores(message: EvaluationResult, model: Mapping[str, Any]) -> None:
    """Checks the counts by class against the message's own sums and the task's model."""
    if message.scores is None:
        return
    if model["task"] != "classification":
        raise Refusal(
            422, "malformed", f"EvaluationResult.scores is given, but the model's task is {model['task']}"
        )
    for holds, problem in scores.checks(message.scores, message.labels, message.correct, model["classes"]):
        if not holds:
            raise Refusal(422, "malformed", f"EvaluationResult.scores.{problem[:200]}")


def _quantity_checks(message: EvaluationResult) -> Iterator[tuple[bool, str]]:
    """The sums of any numbers obey Cauchy and Schwarz: (sum of a)^2 <= n (sum of a^2), but for rounding."""
    sums = message.quantity
    if sums is None:
        return
    least = sums.label_sum * (sums.label_sum / message.labels)  # a power of a large float would raise
    most = math.sqrt(message.labels) * math.sqrt(message.loss_sum)
    yield sums.absolute_sum >= 0, f"quantity.absolute_sum is {sums.absolute_sum}, expected 0 or more"
    yield (
        sums.absolute_sum <= most * _ROUNDING + 1e-6,
        f"quantity.absolute_sum is {sums.absolute_sum}, the squared errors allow {most} at most",
    )
    yield (
        sums.label_square_sum * _ROUNDING + 1e-6 >= least,
        f"quantity.label_square_sum is {sums.label_square_sum}, the sum of the labels needs {least} at least",
    )


def own_task(connection: Connection, caller: str, task: str, kind: TaskKind | None = None) -> TaskRow:
    """The caller's task. Raises: Refusal: 404 `not_found`, 403 `not_yours`, 409 `wrong_kind`."""
    # PostgreSQL rejects NUL in text, even in a comparison.
    row = rounds.find_task(connection, task) if len(task) == 36 and "\0" not in task else None
    if row is None:
        raise Refusal(404, "not_found", "there is no such task")
    if row.device != caller:
        raise Refusal(403, "not_yours", "this task belongs to another device")
    if kind is not None and row.kind != kind:
        raise Refusal(409, "wrong_kind", f"this task is to {row.kind}, not to {kind}")
    return row


def require_open(task: TaskRow, now: datetime) -> None:
    """Requires that the task is leased, before its deadline, and its round accepts results.

    Raises:
        Refusal: 409 with `not_leased`, `lease_expired`, `declined`, `rejected` or `round_closed`.
    """
    if task.state == "leased" and task.is_open and now <= task.deadline_at:
        return
    code, message = _REFUSALS.get((task.state, task.reason), _REFUSALS.get((task.state, None), _CLOSED))
    raise Refusal(
        409, code, f"round {task.round}: {message}" + (f": {task.words}" if code == "rejected" else "")
    )


_CLOSED = ("round_closed", "the round is over and accepts no more results")
_REFUSALS: dict[tuple[str, str | None], tuple[str, str]] = {
    ("waiting", None): ("not_leased", "the device has not fetched this task by a check-in"),
    ("expired", "lease_expired"): ("lease_expired", "the device was silent for longer than its lease"),
    ("declined", None): ("declined", "the device declined this task"),
    ("rejected", None): ("rejected", "its result was rejected"),
    ("accepted", None): ("duplicate", "another result of this task was already accepted"),
}
