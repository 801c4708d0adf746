"""The audit log as people read it: a change and its outcome as one record, newest first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, or_, select

from coordinator.audit.entries import audit, timestamp


@dataclass(frozen=True)
class Filters:
    """Conditions that all must hold. `action` and `resource`: a part of the text; `by`: an exact name."""

    by: str | None = None
    action: str | None = None
    resource: str | None = None
    since: datetime | None = None
    refused: bool | None = None


def records(
    connection: Connection, filters: Filters, limit: int, before: int | None = None
) -> list[dict[str, Any]]:
    """At most `limit` changes and refused attempts with numbers below `before`, newest first."""
    wanted = select(audit).where(audit.c.stage != "ended", *_conditions(filters))
    if before is not None:
        wanted = wanted.where(audit.c.number < before)
    rows = connection.execute(wanted.order_by(audit.c.number.desc()).limit(limit)).all()
    begun = [row.number for row in rows if row.stage == "begun"]
    ends = {
        row.begun: row
        for start in range(0, len(begun), 500)  # SQLite limits the number of parameters
        for row in connection.execute(select(audit).where(audit.c.begun.in_(begun[start : start + 500])))
    }
    return [_record(row, ends.get(row.number)) for row in rows]


def _conditions(filters: Filters) -> Sequence[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if filters.by is not None:
        conditions.append(audit.c.principal == filters.by)
    if filters.action is not None:
        conditions.append(audit.c.action.icontains(filters.action, autoescape=True))
    if filters.since is not None:
        conditions.append(audit.c.time >= timestamp(filters.since))
    if filters.refused is not None:
        is_refused = audit.c.stage == "refused"
        conditions.append(is_refused if filters.refused else ~is_refused)
    if filters.resource is not None:
        # What a request creates is known, and named, at its end.
        ended = select(audit.c.begun).where(
            audit.c.stage == "ended", audit.c.details.contains(filters.resource, autoescape=True)
        )
        named = (
            each.contains(filters.resource, autoescape=True) for each in (audit.c.resource, audit.c.details)
        )
        conditions.append(or_(*named, audit.c.number.in_(ended)))
    return conditions


def _record(row: Row[Any], end: Row[Any] | None) -> dict[str, Any]:
    status = row.status if end is None else end.status
    return {
        "number": row.number,
        "time": str(row.time),
        "kind": str(row.principal_kind),
        "name": str(row.principal),
        "address": str(row.address),
        "action": str(row.action),
        "resource": _values(row.resource),
        "details": {**_values(row.details), **({} if end is None else _values(end.details))},
        "outcome": _outcome(row, end),
        "status": status if isinstance(status, int) else None,
        "ended_at": None if end is None else str(end.time),
        "hash": str(row.hash),
    }


def _outcome(row: Row[Any], end: Row[Any] | None) -> str:
    if row.stage in ("done", "refused"):
        return str(row.stage)
    if end is None:
        return "unfinished"
    return "done" if isinstance(end.status, int) and 200 <= end.status < 400 else "failed"


def _values(text: Any) -> dict[str, Any]:
    """The JSON object in a column. Someone may have put anything there, which `verify_chain` shows."""
    try:
        values = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        values = None
    return values if isinstance(values, dict) else {"unreadable": repr(text)[:200]}
