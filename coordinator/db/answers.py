"""What devices send back: uploads on their way, updates, evaluations, and tasks they give back.

An update is taken only while its round is open and its task leased, and the update that completes a round
closes it in the same transaction: what was accepted is what is folded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from coordinator.db import events
from coordinator.db.rounds import TaskRow, close_round, find_round, finish, of_round
from coordinator.db.tables import evaluations, tasks, updates, uploads
from edge_client.wire.device import EvaluationResult, UploadStart
from edge_client.wire.strict import parse_message


@dataclass(frozen=True)
class Taken:
    """An update that was found good and whose bytes are durable."""

    blob: str
    sent_sha256: str
    payload_bytes: int


def find_upload(connection: Connection, task: str) -> UploadStart | None:
    row = connection.execute(select(uploads).where(uploads.c.task == task)).one_or_none()
    if row is None:
        return None
    return UploadStart(row.size_bytes, row.sha256, row.decoded_bytes, row.encoding)


def start_upload(connection: Connection, task: str, said: UploadStart, now: datetime) -> None:
    """Keeps what is announced, in place of what was announced before."""
    connection.execute(delete(uploads).where(uploads.c.task == task))
    connection.execute(
        insert(uploads).values(
            task=task,
            size_bytes=said.size_bytes,
            sha256=said.sha256,
            decoded_bytes=said.decoded_bytes,
            encoding=said.encoding,
            started_at=now,
        )
    )


def accept(connection: Connection, task: TaskRow, taken: Taken, now: datetime) -> None:
    """Makes an update count. The task must be leased and its round open, as `task` says.

    The update that the round was waiting for closes it.
    """
    opened = find_round(connection, task.run, task.round)
    assert opened is not None and opened.state == "open", "checked by whoever calls"
    seconds = (now - opened.started_at).total_seconds()
    connection.execute(
        insert(updates).values(
            run=task.run,
            round=task.round,
            device=task.device,
            position=task.position,
            blob=taken.blob,
            sent_sha256=taken.sent_sha256,
            payload_bytes=taken.payload_bytes,
            seconds=seconds,
            accepted_at=now,
        )
    )
    finish(connection, task.id, "accepted", now)
    told: dict[str, Any] = {"round": task.round, "seconds": round(seconds, 3), "bytes": taken.payload_bytes}
    events.record(connection, now, "update_accepted", run=task.run, device=task.device, **told)
    if accepted_count(connection, task.run, task.round) >= opened.wanted:
        close_round(connection, task.run, task.round)


def accepted_count(connection: Connection, run: str, number: int) -> int:
    count = select(func.count()).select_from(updates).where(updates.c.run == run, updates.c.round == number)
    return int(connection.execute(count).scalar_one())


def is_counted(connection: Connection, blob: str) -> bool:
    """Whether any update is these bytes."""
    found = select(updates.c.device).where(updates.c.blob == blob).limit(1)
    return connection.execute(found).first() is not None


def counted(connection: Connection, task: TaskRow) -> Taken | None:
    """What was accepted of a train task; None where it was taken back this moment."""
    row = connection.execute(
        select(updates.c.blob, updates.c.sent_sha256, updates.c.payload_bytes).where(
            updates.c.run == task.run, updates.c.round == task.round, updates.c.device == task.device
        )
    ).one_or_none()
    return None if row is None else Taken(**row._mapping)


def take_back(
    connection: Connection,
    run: str,
    number: int,
    device: str,
    fetch_until: datetime,
    deadline_at: datetime,
    now: datetime,
) -> None:
    """An accepted update counts as never received, for its bytes are damaged: its task waits for the device again."""
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
        )
    )
    events.record(connection, now, "update_damaged", run=run, device=device, round=number, blob=blob)


def reject(connection: Connection, task: TaskRow, reason: str, words: str, now: datetime) -> None:
    """A result that does not count, once and for all."""
    finish(connection, task.id, "rejected", now, reason, words)
    told = {"round": task.round, "reason": reason, "words": words}
    events.record(connection, now, "update_rejected", run=task.run, device=task.device, **told)


def decline(connection: Connection, task: TaskRow, reason: str, words: str, now: datetime) -> None:
    """The device gives a live task back."""
    finish(connection, task.id, "declined", now, reason, words)
    told = {"round": task.round, "kind": task.kind, "reason": reason, "words": words}
    events.record(connection, now, "task_declined", run=task.run, device=task.device, **told)


def evaluate(connection: Connection, task: TaskRow, result: Mapping[str, Any], now: datetime) -> None:
    """Keeps a device's figures of a leased evaluate task."""
    connection.execute(
        insert(evaluations).values(
            run=task.run, round=task.round, device=task.device, result=dict(result), received_at=now
        )
    )
    finish(connection, task.id, "accepted", now)
    told = {"round": task.round, "rows": result["rows"]}
    events.record(connection, now, "evaluation_received", run=task.run, device=task.device, **told)


def evaluations_of(connection: Connection, run: str, number: int) -> dict[str, EvaluationResult]:
    """Figures by device, in order of their ids."""
    query = select(evaluations.c.device, evaluations.c.result).where(
        evaluations.c.run == run, evaluations.c.round == number
    )
    return {
        row.device: parse_message(EvaluationResult, row.result, "evaluation")
        for row in connection.execute(query.order_by(evaluations.c.device))
    }
