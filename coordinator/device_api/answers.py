"""Answers that fit a message: figures of an evaluation, or a task given back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from coordinator.api.deps import Serving
from coordinator.db import answers
from coordinator.device_api.bodies import message_of
from coordinator.device_api.identity import Calling
from coordinator.device_api.tasks import own_task, require_wanted
from coordinator.errors import Refusal
from edge_client.wire.device import Decline, EvaluationResult, to_json
from edge_client.wire.messages import LARGEST_COUNT

_WORDS_LIMIT = 500

router = APIRouter()


@router.post("/tasks/{task}/evaluation")
async def evaluation(
    task: str,
    request: Request,
    caller: Calling,
    services: Serving,
) -> Mapping[str, Any]:
    """Sent again, it is answered so again, and counts once."""
    said = await message_of(EvaluationResult, request)
    _require_sums(said)

    def work(connection: Connection) -> str | None:
        asked = own_task(connection, caller.id, task, "evaluate")
        if asked.state == "accepted":
            return None
        now = services.clock()
        require_wanted(asked, now)
        if said.base != asked.offer["params"]["sha256"]:
            raise Refusal(
                422, "stale_base", f"it evaluated model {said.base[:12]}, another one was asked for"
            )
        kept = replace(said, site=said.site[:_WORDS_LIMIT])
        answers.evaluate(connection, asked, to_json(kept), now)
        return asked.run

    run = await asyncio.wrap_future(services.database.write(work))
    if run is not None:
        services.signals.notify(f"run:{run}", "events")
    return {"accepted": True}


@router.post("/tasks/{task}/decline")
async def decline(
    task: str,
    request: Request,
    caller: Calling,
    services: Serving,
) -> Mapping[str, Any]:
    """Sent again, or for a task that is over anyway, it is no matter."""
    said = await message_of(Decline, request)

    def work(connection: Connection) -> str | None:
        asked = own_task(connection, caller.id, task)
        if asked.state not in ("waiting", "leased"):
            return None
        answers.decline(connection, asked, said.code, said.words[:_WORDS_LIMIT], services.clock())
        return asked.run

    run = await asyncio.wrap_future(services.database.write(work))
    if run is not None:
        services.signals.notify(f"run:{run}", "events")
    return {"accepted": True}


def _require_sums(said: EvaluationResult) -> None:
    """Figures that rows can give: the wire has made sure that they are numbers, and finite."""
    checks = (
        (1 <= said.rows <= LARGEST_COUNT, f"rows is {said.rows}, expected 1 or more"),
        (1 <= said.labels <= LARGEST_COUNT, f"labels is {said.labels}, expected 1 or more"),
        (0 <= said.correct <= said.labels, f"correct is {said.correct} of {said.labels} labels"),
        (said.loss_sum >= 0, f"loss_sum is {said.loss_sum}, expected 0 or more"),
    )
    for holds, complaint in checks:
        if not holds:
            raise Refusal(422, "malformed", f"EvaluationResult.{complaint[:200]}")
