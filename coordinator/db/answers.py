"""What devices send back: unfinished uploads, updates, evaluations, statistics, and declined tasks.

An update is accepted only while its round is open and its task leased, and the update that completes a round closes it in
the same transaction: exactly the accepted updates are aggregated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, and_, delete, func, insert, select, update

from coordinator.db import events
from coordinator.db.rounds import MODEL_CLASS, TaskRow, close_round, end_task, find_round, of_round
from coordinator.db.tables import devices, evaluations, find_row, statistics, tasks, updates, uploads
from edge_client.wire.device import EvaluationResult, TaskKind, UploadStart
from edge_client.wire.statistics import StatisticsResult
from edge_client.wire.strict import parse_message

R = TypeVar("R", EvaluationResult, StatisticsResult)


@dataclass(frozen=True)
class AcceptedUpdate:
    """An update that passed its checks and whose bytes are durable; at its relay if there are `figures` (`wire.relays.Figures`)."""

    blob: str
    sent_sha256: str
    payload_bytes: int
    figures: Mapping[str, Any] | None = None


def find_upload(connection: Connection, task: str) -> UploadStart | None:
    return find_row(connection, UploadStart, uploads, uploads.c.task == task)


def start_upload(connection: Connection, task: str, announced: UploadStart, now: datetime) -> None:
    """Stores the announcement of an upload, replacing an earlier one."""
    connection.execute(delete(uploads).where(uploads.c.task == task))
    connection.execute(insert(uploads).values(task=task, started_at=now, **asdict(announced)))


def accept(connection: Connection, task: TaskRow, accepted: AcceptedUpdate, now: datetime) -> None:
    """Counts an update and closes the round if it is complete. The task must be leased and its round open.

    In an asynchronous run the update waits until a round takes it (`coordinator.db.buffers`).
    """
    opened = find_round(connection, task.run, task.round)
    assert opened is not None and task.is_open, "checked by the caller"
    seconds = (now - opened.started_at).total_seconds()
    connection.execute(
        insert(updates).values(
            run=task.run,
            round=task.round,
            device=task.device,
            position=task.position,
            **asdict(accepted),
            seconds=seconds,
            accepted_at=now,
        )
    )
    end_task(connection, task.id, "accepted", now)
    more = {"seconds": round(seconds, 3), "bytes": accepted.payload_bytes}
    _record(connection, task, "update_accepted", now, **more)
    if task.outlives_round:
        return
    connection.execute(update(tasks).where(tasks.c.id == task.id).values(counted_in=task.round))
    if opened.closing.is_complete(count_updates(connection, task.run, task.round)):
        close_round(connection, task.run, task.round)


def count_updates(connection: Connection, run: str, number: int) -> int:
    count = select(func.count()).select_from(updates).where(updates.c.run == run, updates.c.round == number)
    return int(connection.execute(count).scalar_one())


def is_update(connection: Connection, blob: str) -> bool:
    """Whether any accepted update consists of this blob."""
    query = select(updates.c.device).where(updates.c.blob == blob).limit(1)
    return connection.execute(query).first() is not None


def find_update(connection: Connection, task: TaskRow) -> AcceptedUpdate | None:
    """The accepted update of a train task; None if it was revoked at this moment."""
    of_task = (updates.c.run == task.run, updates.c.round == task.round, updates.c.device == task.device)
    return find_row(connection, AcceptedUpdate, updates, *of_task)


def revoke_update(
    connection: Connection,
    run: str,
    number: int,
    device: str,
    fetch_until: datetime,
    deadline_at: datetime,
    now: datetime,
) -> None:
    """Drops an accepted update whose bytes are damaged; its task waits for the device again."""
    which = and_(of_round(run, number, "train"), tasks.c.device == device, tasks.c.state == "accepted")
    task = connection.execute(select(tasks.c.id, tasks.c.offer).where(which)).one()
    mine = and_(updates.c.run == run, updates.c.round == number, updates.c.device == device)
    blob = connection.execute(select(updates.c.blob).where(mine)).scalar_one()
    connection.execute(delete(updates).where(mine))
    connection.execute(delete(uploads).where(uploads.c.task == task.id))
    connection.execute(
        update(tasks)
        .where(tasks.c.id == task.id)
        .values(
            state="waiting",
            offer={**task.offer, "deadline_at": deadline_at.isoformat()},
            leased_until=fetch_until,
            answered_at=None,
            counted_in=None,
        )
    )
    events.record(connection, now, "update_damaged", run=run, device=device, round=number, blob=blob)


def reject(connection: Connection, task: TaskRow, reason: str, message: str, now: datetime) -> None:
    """Rejects the result of a task for good."""
    end_task(connection, task.id, "rejected", now, reason, message)
    _record(connection, task, "update_rejected", now, reason=reason, words=message)


def decline(connection: Connection, task: TaskRow, reason: str, message: str, now: datetime) -> None:
    """Ends a live task that its device declined."""
    end_task(connection, task.id, "declined", now, reason, message)
    _record(connection, task, "task_declined", now, kind=task.kind, reason=reason, words=message)


def record_evaluation(
    connection: Connection, task: TaskRow, result: Mapping[str, Any], now: datetime
) -> None:
    """Stores a device's figures of a leased evaluate task."""
    _store_result(connection, evaluations, task, result, now)
    _record(connection, task, "evaluation_received", now, rows=result["rows"])


def evaluations_of(connection: Connection, run: str, number: int) -> dict[str, EvaluationResult]:
    """Device -> its figures, in order of their ids."""
    return _results_of(connection, evaluations, run, number, EvaluationResult)


def evaluator_traits(connection: Connection, run: str, number: int) -> dict[str, dict[str, str]]:
    """Device -> the runtime that evaluated this round there, the class it reported last, and its model class if the run has any."""
    query = (
        select(tasks.c.device, tasks.c.runtime, devices.c.report, MODEL_CLASS.label("model_class"))
        .join(devices, devices.c.id == tasks.c.device)
        .where(of_round(run, number, "evaluate"), tasks.c.state == "accepted")
    )
    return {
        row.device: {"runtime": row.runtime, "class": row.report.get("device_class", "")}
        | ({"model_class": row.model_class} if row.model_class else {})
        for row in connection.execute(query)
    }


def record_statistics(
    connection: Connection, task: TaskRow, result: Mapping[str, Any], now: datetime
) -> None:
    """Stores what a device reports in a leased statistics task."""
    _store_result(connection, statistics, task, result, now)
    _record(connection, task, "statistics_received", now, rows=result["rows"])


def statistics_of(connection: Connection, run: str, number: int) -> dict[str, StatisticsResult]:
    """Device -> what it reported, in order of their ids."""
    return _results_of(connection, statistics, run, number, StatisticsResult)


def unanswered(connection: Connection, run: str, number: int, kind: TaskKind) -> dict[str, str]:
    """Device -> why it gave no result to its task."""
    query = select(tasks.c.device, tasks.c.reason, tasks.c.words).where(
        of_round(run, number, kind), tasks.c.state.in_(("declined", "expired", "rejected"))
    )
    return {row.device: row.words or row.reason for row in connection.execute(query.order_by(tasks.c.device))}


def _record(connection: Connection, task: TaskRow, event: str, now: datetime, **values: Any) -> None:
    events.record(connection, now, event, run=task.run, device=task.device, round=task.round, **values)


def _store_result(
    connection: Connection, table: Table, task: TaskRow, result: Mapping[str, Any], now: datetime
) -> None:
    """Stores the result of a task that is no update, and ends the task."""
    row = {"run": task.run, "round": task.round, "device": task.device}
    connection.execute(insert(table).values(**row, result=dict(result), received_at=now))
    end_task(connection, task.id, "accepted", now)


def _results_of(connection: Connection, table: Table, run: str, number: int, kind: type[R]) -> dict[str, R]:
    query = select(table.c.device, table.c.result).where(table.c.run == run, table.c.round == number)
    return {
        row.device: parse_message(kind, row.result, table.name)
        for row in connection.execute(query.order_by(table.c.device))
    }
