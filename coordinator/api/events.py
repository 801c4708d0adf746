"""The event stream: past events from any id on, then new ones as they happen, for as long as the credentials are valid."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy import Connection, func, select

from coordinator.api.deps import PrincipalDep, ServicesDep, is_signed_in_still
from coordinator.db import events, tables

router = APIRouter(tags=["events"])

_BATCH = 500
_CHECK_SECONDS = 5.0
"""After which a stream checks that whoever reads it is signed in still."""


@router.get("/events", response_class=EventSourceResponse)
async def stream_events(
    services: ServicesDep,
    principal: PrincipalDep,
    request: Request,
    run: Annotated[str | None, Query(description="Only events of this run.")] = None,
    after: Annotated[
        int | None, Query(ge=0, lt=2**63, description="Begin after this event; 0: with the first.")
    ] = None,
    last_event_id: Annotated[
        int | None, Header(ge=0, lt=2**63, description="As `after`; what a browser sends when it reconnects.")
    ] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Server-Sent Events. Without `after`, only events from now on.

    Ends with the server, and within seconds when the session or token ends, or the user is disabled or gets another role.
    """
    last = last_event_id if last_event_id is not None else after
    if last is None:
        last = await asyncio.to_thread(services.database.read, _newest)
    checked_at = time.monotonic()
    while not services.signals.closed:
        if time.monotonic() - checked_at >= _CHECK_SECONDS:
            if not await is_signed_in_still(services, request, principal):
                return
            checked_at = time.monotonic()
        seen = services.signals.seen("events")
        read = partial(events.since, after=last, limit=_BATCH, run=run)
        rows = await asyncio.to_thread(services.database.read, read)
        for row in rows:
            last = row.id
            yield ServerSentEvent(id=str(row.id), data=events.as_json(row))
        if not rows:
            await services.signals.wait_async("events", seen, _CHECK_SECONDS)


def _newest(connection: Connection) -> int:
    return int(connection.execute(select(func.coalesce(func.max(tables.events.c.id), 0))).scalar_one())
