"""Queries of rounds whose updates relays keep: figures of updates, tasks to fold them, and what came back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, delete, select, update

from coordinator.db import events
from coordinator.db import tables as t
from coordinator.db.rounds import LIVE, end_task, of_round
from coordinator.db.tables import tasks, updates, uploads
from edge_client.wire.relays import Figures
from edge_client.wire.strict import parse_message

ABSENT = "relay_absent"
"""Reason of a task whose update was accepted at a relay, which did not pass it on."""


@dataclass(frozen=True)
class FoldTask:
    """A relay's task to fold its updates of a round. `result`: the blob of its answer, once accepted."""

    id: str
    device: str
    state: str
    offer: Mapping[str, Any]
    words: str | None
    result: str | None


def figures_of(connection: Connection, run: str, number: int) -> dict[int, Figures]:
    """Figures of the accepted updates of a round that relays keep, by position."""
    query = select(updates.c.position, updates.c.figures).where(
        updates.c.run == run, updates.c.round == number
    )
    return {
        row.position: parse_message(Figures, row.figures, "figures")
        for row in connection.execute(query)
        if row.figures is not None
    }


def fold_tasks(connection: Connection, run: str, number: int) -> list[FoldTask]:
    """The tasks to fold of a round."""
    columns = (tasks.c[name] for name in ("id", "device", "state", "offer", "words", "result"))
    query = select(*columns).where(of_round(run, number, "fold")).order_by(tasks.c.position)
    return [FoldTask(**row._mapping) for row in connection.execute(query)]


def forget_fold_tasks(connection: Connection, ids: Collection[str]) -> None:
    """Deletes tasks to fold, whose answers are not wanted any more."""
    connection.execute(delete(uploads).where(uploads.c.task.in_(ids)))
    connection.execute(delete(tasks).where(tasks.c.id.in_(ids), tasks.c.kind == "fold"))


def forget_earlier_folds(connection: Connection, run: str, number: int) -> None:
    """Deletes the tasks to fold of rounds before this one, whose blobs are of no more use."""
    before = select(tasks.c.id).where(tasks.c.run == run, tasks.c.round < number, tasks.c.kind == "fold")
    forget_fold_tasks(connection, list(connection.execute(before).scalars()))


def accept_fold(connection: Connection, task: str, blob: str, now: datetime) -> None:
    """Stores the answer to a task to fold, and ends it."""
    connection.execute(update(tasks).where(tasks.c.id == task, tasks.c.state.in_(LIVE)).values(result=blob))
    end_task(connection, task, "accepted", now)


def absences(connection: Connection, run: str) -> list[dict[str, Any]]:
    """Which relays of a run did not pass on their updates, in which rounds, and why."""
    wanted = select(t.events).where(t.events.c.run == run, t.events.c.event == ABSENT)
    return [
        {"relay": row.device, **row._mapping["values"]}
        for row in connection.execute(wanted.order_by(t.events.c.id))
    ]


def result_of(connection: Connection, task: str) -> str | None:
    """The blob of the accepted answer to a task to fold."""
    return connection.execute(select(tasks.c.result).where(tasks.c.id == task)).scalar_one_or_none()


def is_result(connection: Connection, blob: str) -> bool:
    """Whether any relay has passed on this blob."""
    return connection.execute(select(tasks.c.id).where(tasks.c.result == blob).limit(1)).first() is not None


def lose_updates(
    connection: Connection,
    run: str,
    number: int,
    relay: str,
    why: str,
    devices: Collection[str],
    now: datetime,
) -> None:
    """Takes back the accepted updates of these devices, which their relay did not pass on."""
    lost = and_(of_round(run, number, "train"), tasks.c.device.in_(devices), tasks.c.state == "accepted")
    connection.execute(
        update(tasks).where(lost).values(state="expired", reason=ABSENT, words=why, counted_in=None)
    )
    kept = and_(updates.c.run == run, updates.c.round == number, updates.c.device.in_(devices))
    connection.execute(delete(updates).where(kept))
    events.record(
        connection, now, ABSENT, run=run, device=relay, round=number, updates=len(devices), words=why
    )
