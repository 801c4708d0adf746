"""The event log: a row for every change of state, in the transaction that makes the change.

An event is `<subject>_<past-tense verb>`, with the run and the device that it concerns and further values in JSON. One
thread writes, so ids increase in order of commit, and a reader that continues from an id misses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, ScalarSelect, insert, select

from coordinator.db.tables import devices, events, runs
from coordinator.json_values import finite


def record(
    connection: Connection,
    clock_now: datetime,
    event: str,
    *,
    run: str | None = None,
    device: str | None = None,
    project: str | None = None,
    **values: Any,
) -> None:
    """Writes an event in the transaction of its change. The caller then signals: `signals.notify("events")`.

    `project`: by default that of the run or the device. An event without any concerns the whole coordinator. `values` are JSON for people to read: no arrays, no secrets. A number that is not finite becomes null.
    """
    connection.execute(
        insert(events).values(
            {
                events.c.time: clock_now,
                events.c.event: event,
                events.c.run: run,
                events.c.device: device,
                events.c.project: project or _project_of(run, device),
                events.c["values"]: finite(values),
            }
        )
    )


def _project_of(run: str | None, device: str | None) -> ScalarSelect[Any] | None:
    if run is not None:
        return select(runs.c.project).where(runs.c.id == run).scalar_subquery()
    if device is not None:
        return select(devices.c.project).where(devices.c.id == device).scalar_subquery()
    return None


def since(
    connection: Connection,
    after: int,
    limit: int,
    run: str | None = None,
    *,
    before: int | None = None,
    newest_first: bool = False,
) -> Sequence[Row[Any]]:
    """At most `limit` rows of `events` with an id above `after` and below `before`, oldest first by default; of one run if given."""
    wanted = select(events).where(events.c.id > after)
    if before is not None:
        wanted = wanted.where(events.c.id < before)
    if run is not None:
        wanted = wanted.where(events.c.run == run)
    ordered = events.c.id.desc() if newest_first else events.c.id
    return connection.execute(wanted.order_by(ordered).limit(limit)).all()


def first(connection: Connection, run: str, event: str) -> Row[Any] | None:
    """The oldest row of this event of a run."""
    wanted = select(events).where(events.c.run == run, events.c.event == event)
    return connection.execute(wanted.order_by(events.c.id).limit(1)).one_or_none()


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
