"""What may need a person: how present the fleet is, certificates that were not renewed in time, runs that wait."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Connection, and_, case, func, select

from coordinator.db.tables import LIVE_RUNS, devices, events, runs
from coordinator.scheduling.matching import OVERDUE_AFTER, Presence

_PROGRESS = ("run_created", "run_started", "run_resumed", "round_started", "round_committed")
_WAITING = ("round_waiting", "run_stalled")


@dataclass(frozen=True)
class WaitingRun:
    """A run that does not go on. `why`: it waits for devices, or the disk or the database fails.

    Attributes:
        eligible, wanted: devices that may take part, and how many the round needs; of a run that waits for devices.
        reason: of a stalled one.
    """

    run: str
    name: str
    why: Literal["devices", "stalled"]
    since: datetime
    eligible: int | None
    wanted: int | None
    reason: str | None


def presences(connection: Connection, now: datetime) -> dict[Presence, int]:
    """Number of active devices by presence, as `coordinator.scheduling.matching.presence` has it."""
    due = func.coalesce(devices.c.expected_at, devices.c.last_seen_at)
    kind = case(
        (due.is_(None), "offline"),
        (due < now - OVERDUE_AFTER, "offline"),
        (due < now, "late"),
        else_="online",
    )
    seen = case((devices.c.last_seen_at.is_(None), "offline"), else_=kind).label("presence")
    query = select(seen, func.count()).where(devices.c.state == "active").group_by(seen)
    counts: dict[Presence, int] = {"online": 0, "late": 0, "offline": 0}
    return counts | {row[0]: int(row[1]) for row in connection.execute(query)}


def expiring_certificates(connection: Connection, now: datetime, within: timedelta) -> int:
    """Number of active devices whose certificate has expired or does so within this time."""
    ending = and_(devices.c.state == "active", devices.c.certificate_until < now + within)
    return int(connection.execute(select(func.count()).select_from(devices).where(ending)).scalar_one())


def waiting_runs(connection: Connection) -> list[WaitingRun]:
    """The live runs whose last step was to wait, oldest first."""
    live = select(runs.c.id, runs.c.name).where(runs.c.state.in_(LIVE_RUNS)).order_by(runs.c.created_at)
    found = []
    for row in connection.execute(live).all():
        last = connection.execute(
            select(events)
            .where(events.c.run == row.id, events.c.event.in_((*_PROGRESS, *_WAITING)))
            .order_by(events.c.id.desc())
            .limit(1)
        ).one_or_none()
        if last is not None and last.event in _WAITING:
            found.append(_waiting(row, last))
    return found


def _waiting(run: Any, event: Any) -> WaitingRun:
    values = event._mapping["values"]
    stalled = event.event == "run_stalled"
    return WaitingRun(
        run.id,
        run.name,
        "stalled" if stalled else "devices",
        event.time,
        values.get("eligible"),
        values.get("wanted"),
        values.get("reason"),
    )
