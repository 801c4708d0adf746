"""Queries of asynchronous runs, whose tasks outlive the round in which they started. Each is one step of a transaction.

The answer to a task counts for a round once that round takes it: `tasks.counted_in`. Until then an accepted update waits in the
buffer of its run, in the order of acceptance. What a round took is stored, so whoever aggregates it again takes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, select, update

from coordinator.db import events, rounds
from coordinator.db.rounds import LIVE, EndedTask, TaskRow
from coordinator.db.tables import tasks
from edge_client.wire.device import TaskMessage


@dataclass(frozen=True)
class EndedAnswer(EndedTask):
    """How a train task ended, which may have started in an earlier round."""

    id: str
    message: TaskMessage


def live(connection: Connection, run: str) -> list[TaskRow]:
    """The train tasks of a run that may still be answered, of whatever round."""
    return rounds.find_tasks(connection, _of_run(run), tasks.c.state.in_(LIVE))


def waiting(connection: Connection, run: str) -> list[EndedAnswer]:
    """Answers that no round has taken, in the order of their arrival."""
    return _ended(connection, run, tasks.c.counted_in.is_(None))


def taken(connection: Connection, run: str, number: int) -> list[EndedAnswer]:
    """Answers that a round has taken, in the order of their arrival."""
    return _ended(connection, run, tasks.c.counted_in == number)


def take(connection: Connection, run: str, number: int, answers: Sequence[str]) -> None:
    """Closes a round, which takes the answers to these tasks."""
    rounds.close_round(connection, run, number)
    connection.execute(update(tasks).where(tasks.c.id.in_(answers)).values(counted_in=number))


def reopen(connection: Connection, run: str, number: int, deadline_at: datetime) -> None:
    """Opens a closed round again; what it took waits once more."""
    rounds.reopen_round(connection, run, number, deadline_at)
    connection.execute(
        update(tasks).where(_of_run(run), tasks.c.counted_in == number).values(counted_in=None)
    )


def started_in(connection: Connection, run: str, number: int) -> list[str]:
    """The devices that started in a round."""
    query = select(tasks.c.device).where(rounds.of_round(run, number, "train"))
    return list(connection.execute(query).scalars())


def stop_stale(connection: Connection, run: str, oldest: int, current: int, now: datetime) -> list[str]:
    """Rejects what devices are at work on since before round `oldest`, and returns them."""
    stale = [task for task in live(connection, run) if task.round < oldest]
    for task in stale:
        message = f"the model that it trains is {current - task.round} versions old by now, which is too old"
        rounds.end_task(connection, task.id, "rejected", now, "stale_base", message)
        details: dict[str, Any] = {"round": task.round, "reason": "stale_base", "words": message}
        events.record(connection, now, "update_rejected", run=run, device=task.device, **details)
    return [task.device for task in stale]


def expire(connection: Connection, run: str, now: datetime) -> list[str]:
    """Ends live tasks whose lease has expired or whose deadline has passed, and returns their devices."""
    devices = []
    for task in live(connection, run):
        if task.deadline_at < now:
            rounds.end_task(connection, task.id, "expired", now, "deadline", "no result by the deadline")
            devices.append(task.device)
        elif task.leased_until is not None and task.leased_until < now:
            rounds.expire_lease(connection, task, now)
            devices.append(task.device)
    return devices


def renew_leases(connection: Connection, run: str, until: datetime) -> None:
    """Renews the leases of all live train tasks, which devices could not renew while the coordinator was down."""
    early = and_(_of_run(run), tasks.c.state.in_(LIVE), tasks.c.leased_until < until)
    connection.execute(update(tasks).where(early).values(leased_until=until))


def _of_run(run: str) -> ColumnElement[bool]:
    return and_(tasks.c.run == run, tasks.c.kind == "train")


def _ended(connection: Connection, run: str, where: ColumnElement[bool]) -> list[EndedAnswer]:
    query = rounds.select_ended(tasks.c.id, tasks.c.offer).where(_of_run(run), where)
    query = query.order_by(tasks.c.answered_at, tasks.c.round, tasks.c.position)
    return [_answer(dict(row._mapping)) for row in connection.execute(query)]


def _answer(row: dict[str, Any]) -> EndedAnswer:
    message = TaskMessage.from_json(row.pop("offer")["message"])
    return EndedAnswer(message=message, **row)
