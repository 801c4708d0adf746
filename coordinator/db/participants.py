"""Devices as candidates for tasks: those present, with their latest reports."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, and_, func, or_, select, update

from coordinator.db.rounds import LEFT_AT_WORK, OPTED_OUT
from coordinator.db.tables import devices, tasks
from coordinator.scheduling.matching import OVERDUE_AFTER, Candidate
from edge_client.wire.device import CheckIn
from edge_client.wire.strict import InvalidDocument, parse_message

_CANDIDATE = (
    devices.c.id,
    devices.c.name,
    devices.c.state,
    devices.c.device_group.label("group"),
    devices.c.certificate_until,
    devices.c.last_seen_at,
    devices.c.expected_at,
    devices.c.report,
    devices.c.project,
    devices.c.relay,
    devices.c.relay_names,
    select(func.max(tasks.c.answered_at))
    .where(
        tasks.c.device == devices.c.id,
        or_(
            tasks.c.state == "expired",
            and_(tasks.c.state == "declined", tasks.c.reason != OPTED_OUT),
            tasks.c.reason == LEFT_AT_WORK,
        ),
        tasks.c.answered_at > devices.c.last_seen_at,
    )
    .scalar_subquery()
    .label("missed_at"),
)


def candidates(connection: Connection, now: datetime, project: str) -> list[Candidate]:
    """Active devices of a project that checked in and are not overdue, by id."""
    query = (
        select(*_CANDIDATE)
        .where(devices.c.state == "active", devices.c.last_seen_at.is_not(None))
        .where(devices.c.project == project)
        .where(func.coalesce(devices.c.expected_at, devices.c.last_seen_at) >= now - OVERDUE_AFTER)
        .order_by(devices.c.id)
    )
    return [_candidate(row) for row in connection.execute(query)]


def everyone(connection: Connection) -> list[Candidate]:
    """Active devices that have ever checked in, by id."""
    query = select(*_CANDIDATE).where(devices.c.state == "active", devices.c.last_seen_at.is_not(None))
    return [_candidate(row) for row in connection.execute(query.order_by(devices.c.id))]


def enrolled(connection: Connection, limit: int, after: str = "", *, project: str) -> list[Candidate]:
    """At most `limit` devices of a project that may check in or wait for approval, by id, after the id `after`."""
    states = ("active", "pending")
    query = select(*_CANDIDATE).where(devices.c.project == project)
    query = query.where(devices.c.state.in_(states), devices.c.id > after)
    return [_candidate(row) for row in connection.execute(query.order_by(devices.c.id).limit(limit))]


def candidate(connection: Connection, device: str) -> Candidate | None:
    """One device, whatever its state."""
    row = connection.execute(select(*_CANDIDATE).where(devices.c.id == device)).one_or_none()
    return _candidate(row) if row is not None else None


def fleet_size(connection: Connection, project: str | None = None) -> int:
    """Number of devices that may check in; of one project if given."""
    count = select(func.count()).select_from(devices).where(devices.c.state == "active")
    if project is not None:
        count = count.where(devices.c.project == project)
    return int(connection.execute(count).scalar_one())


def checked_in(
    connection: Connection, device: str, report: Mapping[str, Any], now: datetime, expected_at: datetime
) -> None:
    """Stores a device's report and the time of its next check-in."""
    values = {"report": dict(report), "last_seen_at": now, "expected_at": expected_at}
    connection.execute(update(devices).where(devices.c.id == device).values(**values))


def expect(connection: Connection, device: str, seen_at: datetime, expected_at: datetime) -> None:
    """Changes the time of a device's next check-in, unless it has checked in again since `seen_at`."""
    same = and_(devices.c.id == device, devices.c.last_seen_at == seen_at)
    connection.execute(update(devices).where(same).values(expected_at=expected_at))


def _candidate(row: Row[*tuple[Any, ...]]) -> Candidate:
    return Candidate(**{**row._mapping, "report": _report(row.report)})


def _report(stored: Mapping[str, Any]) -> CheckIn | None:
    """The last check-in; None if this version cannot parse what an earlier one stored. No device may fail the runs of
    others, and the next check-in replaces it."""
    try:
        return parse_message(CheckIn, stored, "report") if stored else None
    except InvalidDocument:
        return None
