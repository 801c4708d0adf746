"""The event stream: past events from any id on, then new ones as they happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy import Connection, Row, func, select

from coordinator.context.services import ServicesDep
from coordinator.db import events, tables

router = APIRouter(tags=["events"])

_BATCH = 500
_POLL_SECONDS = 60.0


@router.get("/events", response_class=EventSourceResponse)
async def stream_events(
    services: ServicesDep,
    run: Annotated[str | None, Query(description="Only events of this run.")] = None,
    after: Annotated[
        int | None, Query(ge=0, lt=2**63, description="Begin after this event; 0: with the first.")
    ] = None,
    last_event_id: Annotated[
        int | None, Header(ge=0, lt=2**63, description="As `after`; what a browser sends when it reconnects.")
    ] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Server-Sent Events. Without `after`, only events from now on; ends with the server."""
    last = last_event_id if last_event_id is not None else after
    if last is None:
        last = await asyncio.to_thread(services.database.read, _newest)
    while not services.signals.closed:
        seen = services.signals.seen("events")
        read = partial(events.since, after=last, limit=_BATCH, run=run)
        rows = await asyncio.to_thread(services.database.read, read)
        for row in rows:
            last = row.id
            yield ServerSentEvent(id=str(row.id), data=as_json(row))
        if not rows:
            await services.signals.wait_async("events", seen, _POLL_SECONDS)


def as_json(row: Row[Any]) -> dict[str, Any]:
    """An event as JSON, without null keys."""
    subjects = {"run": row.run, "device": row.device}
    return {
        "id": row.id,
        "time": row.time.isoformat(timespec="milliseconds"),
        "event": row.event,
        **{key: value for key, value in subjects.items() if value is not None},
        **row._mapping["values"],
    }


def _newest(connection: Connection) -> int:
    return int(connection.execute(select(func.coalesce(func.max(tables.events.c.id), 0))).scalar_one())
