"""What one device did: its tasks, with what it sent for them, and its events; newest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, func, or_, select

from coordinator.db.rounds import MODEL_CLASS
from coordinator.db.tables import evaluations, events, runs, statistics, tasks, updates, uploads


@dataclass(frozen=True)
class DeviceTask:
    """A task of a device and its outcome.

    Attributes:
        model_class: that the device had, in a run whose devices train models of different width.
        reason, words: why it ended without a result: a code and a message.
        sent_bytes: size of its upload, also of a rejected or unfinished one; None: it began none, as evaluations do.
        seconds: from the start of the round until its update was accepted.
        reported: what it said in place of an upload: the figures of an evaluation, or the rows behind statistics.
    """

    id: str
    run: str
    run_name: str
    round: int
    kind: str
    runtime: str
    state: str
    leased_until: datetime | None
    answered_at: datetime | None
    reason: str | None
    words: str | None
    sent_bytes: int | None
    seconds: float | None
    reported: Mapping[str, Any] | None
    model_class: str | None


def tasks_of(
    connection: Connection, device: str, limit: int, after: str | None = None
) -> list[DeviceTask] | None:
    """At most `limit` tasks of a device, of the newest run and round first; those behind the task `after`, if given.

    None: the device has no task `after`.
    """
    answers = [
        and_(of.c.run == tasks.c.run, of.c.round == tasks.c.round, of.c.device == tasks.c.device)
        for of in (updates, evaluations, statistics)
    ]
    joined = (
        tasks.join(runs, runs.c.id == tasks.c.run)
        .outerjoin(uploads, uploads.c.task == tasks.c.id)
        .outerjoin(updates, and_(answers[0], tasks.c.kind == "train"))
        .outerjoin(evaluations, and_(answers[1], tasks.c.kind == "evaluate"))
        .outerjoin(statistics, and_(answers[2], tasks.c.kind == "statistics"))
    )
    names = (
        "id",
        "run",
        "round",
        "kind",
        "runtime",
        "state",
        "leased_until",
        "answered_at",
        "reason",
        "words",
    )
    query = (
        select(
            *(tasks.c[name] for name in names),
            runs.c.name.label("run_name"),
            func.coalesce(updates.c.payload_bytes, uploads.c.size_bytes).label("sent_bytes"),
            updates.c.seconds,
            func.nullif(MODEL_CLASS, "").label("model_class"),
            evaluations.c.result.label("evaluation"),
            statistics.c.result.label("statistics"),
        )
        .select_from(joined)
        .where(tasks.c.device == device)
        .order_by(runs.c.created_at.desc(), tasks.c.run, tasks.c.round.desc(), tasks.c.kind)
        .limit(limit)
    )
    if after is not None:
        condition = _behind(connection, device, after)
        if condition is None:
            return None
        query = query.where(condition)
    return [_task(row) for row in connection.execute(query)]


def events_of(
    connection: Connection, device: str, limit: int, before: int | None = None
) -> Sequence[Row[Any]]:
    """At most `limit` rows of `events` that concern a device, newest first; those with smaller ids than `before`."""
    wanted = select(events).where(events.c.device == device)
    if before is not None:
        wanted = wanted.where(events.c.id < before)
    return connection.execute(wanted.order_by(events.c.id.desc()).limit(limit)).all()


def _behind(connection: Connection, device: str, task: str) -> ColumnElement[bool] | None:
    """What holds for the device's tasks that come behind this one."""
    query = (
        select(runs.c.created_at, tasks.c.run, tasks.c.round, tasks.c.kind)
        .select_from(tasks.join(runs, runs.c.id == tasks.c.run))
        .where(tasks.c.id == task, tasks.c.device == device)
    )
    last = connection.execute(query).one_or_none()
    if last is None:
        return None
    return or_(
        runs.c.created_at < last.created_at,
        and_(
            runs.c.created_at == last.created_at,
            or_(
                tasks.c.run > last.run,
                and_(
                    tasks.c.run == last.run,
                    or_(
                        tasks.c.round < last.round,
                        and_(tasks.c.round == last.round, tasks.c.kind > last.kind),
                    ),
                ),
            ),
        ),
    )


def _task(row: Any) -> DeviceTask:
    columns = dict(row._mapping)
    evaluation, statistic = columns.pop("evaluation"), columns.pop("statistics")
    return DeviceTask(reported=evaluation or (statistic and {"rows": statistic["rows"]}), **columns)
