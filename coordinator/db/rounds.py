"""Queries of rounds and tasks. Each function is one step of a transaction.

A task goes waiting → leased → accepted, rejected, declined, expired or cancelled; a round goes open → closed →
committed. Neither goes back, with one exception: if the disk has damaged an accepted update, its round opens again and
its task waits. What devices send is in `coordinator.db.answers`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from coordinator.db import events
from coordinator.db.tables import LIVE_RUNS, evaluations, rounds, runs, tasks, updates, uploads
from coordinator.rounds.closing import Closing
from edge_client.relay.expected import Expected
from edge_client.wire.device import TaskKind

LIVE = ("waiting", "leased")
"""States of a task that may still be answered."""

_ENDED = ("accepted", "rejected", "declined", "expired")

_UPDATE_OF_TASK = and_(
    updates.c.run == tasks.c.run, updates.c.round == tasks.c.round, updates.c.device == tasks.c.device
)

MODEL_CLASS = tasks.c.offer["model_class"].as_string()
"""Of a task's device; empty or NULL if its run has none."""

LEFT_AT_WORK = "left_at_work"
"""Reason of a cancelled task that its device was working on."""

OPTED_OUT = "opted_out"
"""Reason of a task that is declined at a check-in, because the device's owner opted out of the run."""


@dataclass(frozen=True)
class TaskRow:
    """A task, with the state of its round; that is None for evaluations, which belong to no open round.

    Attributes:
        offer: `wire.device.TaskOffer` as JSON, plus `deadline_at` and `outlives_round`.
        reason, words: why it ended without a result: a code and a message.
    """

    id: str
    run: str
    round: int
    kind: TaskKind
    position: int
    device: str
    state: str
    offer: Mapping[str, Any]
    leased_until: datetime | None
    reason: str | None
    words: str | None
    answered_at: datetime | None
    round_state: str | None

    @property
    def deadline_at(self) -> datetime:
        return datetime.fromisoformat(self.offer["deadline_at"])

    @property
    def outlives_round(self) -> bool:
        """Whether it is of an asynchronous run, in which a later round may take its answer."""
        return bool(self.offer.get("outlives_round"))

    @property
    def is_open(self) -> bool:
        """Whether its round accepts answers, if any round has to."""
        return self.kind != "train" or self.outlives_round or self.round_state == "open"


@dataclass(frozen=True)
class RoundRow:
    """A round as opened."""

    run: str
    number: int
    state: str
    wanted: int
    population: int
    expected: Expected
    started_at: datetime
    deadline_at: datetime

    @property
    def closing(self) -> Closing:
        return Closing(self.wanted, (self.deadline_at - self.started_at).total_seconds())


@dataclass(frozen=True)
class EndedTask:
    """How a train task ended. `blob` is set if its update was accepted, `figures` if a relay keeps it."""

    device: str
    position: int
    state: str
    reason: str | None
    words: str | None
    answered_at: datetime
    blob: str | None
    payload_bytes: int
    figures: Mapping[str, Any] | None


def find_round(connection: Connection, run: str, number: int) -> RoundRow | None:
    columns = (rounds.c[each.name] for each in fields(RoundRow))
    query = select(*columns).where(rounds.c.run == run, rounds.c.number == number)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    narrower = {name: _shapes(each) for name, each in row.expected.get("narrower", {}).items()}
    expected = {**row.expected, "shapes": _shapes(row.expected["shapes"]), "narrower": narrower}
    return RoundRow(**{**row._mapping, "expected": Expected(**expected)})


def _shapes(stored: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in stored.items()}


def open_round(connection: Connection, opened: RoundRow, base: str) -> None:
    """Adds a round that accepts updates from now on; the caller adds its tasks in the same transaction."""
    connection.execute(insert(rounds).values(**asdict(opened), base=base))


def close_round(connection: Connection, run: str, number: int) -> None:
    """Stops accepting updates of this round. Idempotent."""
    connection.execute(
        update(rounds)
        .where(rounds.c.run == run, rounds.c.number == number, rounds.c.state == "open")
        .values(state="closed")
    )


def forget_round(connection: Connection, run: str, number: int) -> None:
    """Deletes an uncommitted round of a synchronous run, its tasks, and what devices sent for them."""
    own_tasks = select(tasks.c.id).where(tasks.c.run == run, tasks.c.round == number)
    connection.execute(delete(uploads).where(uploads.c.task.in_(own_tasks)))
    for table in (updates, evaluations, tasks):
        connection.execute(delete(table).where(table.c.run == run, table.c.round == number))
    connection.execute(delete(rounds).where(rounds.c.run == run, rounds.c.number == number))


def reopen_round(connection: Connection, run: str, number: int, deadline_at: datetime) -> None:
    """Lets a closed round accept updates again, until the later of its deadline and this one."""
    this = and_(rounds.c.run == run, rounds.c.number == number)
    connection.execute(update(rounds).where(this, rounds.c.state == "closed").values(state="open"))
    connection.execute(
        update(rounds).where(this, rounds.c.deadline_at < deadline_at).values(deadline_at=deadline_at)
    )


def add_tasks(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds tasks. `rows`: their columns."""
    if rows:
        connection.execute(insert(tasks), [dict(row) for row in rows])


def train_offers(connection: Connection, run: str, number: int) -> list[tuple[int, Mapping[str, Any]]]:
    """Position and offer of a round's train tasks, in order."""
    query = select(tasks.c.position, tasks.c.offer).where(of_round(run, number, "train"))
    return [(row.position, row.offer) for row in connection.execute(query.order_by(tasks.c.position))]


def model_classes(connection: Connection, run: str, number: int) -> dict[str, str]:
    """Device -> its model class in a round's train tasks; empty without classes."""
    query = select(tasks.c.device, MODEL_CLASS).where(of_round(run, number, "train"))
    return {device: name for device, name in connection.execute(query) if name}


def find_task(connection: Connection, task: str) -> TaskRow | None:
    row = connection.execute(_TASKS.where(tasks.c.id == task)).one_or_none()
    return TaskRow(**row._mapping) if row is not None else None


def find_tasks(connection: Connection, *where: ColumnElement[bool]) -> list[TaskRow]:
    """All tasks for which this holds."""
    return [TaskRow(**row._mapping) for row in connection.execute(_TASKS.where(*where))]


def live_tasks(connection: Connection, device: str) -> list[TaskRow]:
    """The tasks that a device may work on or fetch: leased ones first, then by deadline."""
    rows = find_tasks(connection, tasks.c.device == device, tasks.c.state.in_(LIVE))
    return sorted(rows, key=lambda row: (row.state != "leased", row.deadline_at, row.id))


def lease(connection: Connection, task: str, until: datetime) -> None:
    """Leases a live task to its device, or renews its lease."""
    connection.execute(
        update(tasks)
        .where(tasks.c.id == task, tasks.c.state.in_(LIVE))
        .values(state="leased", leased_until=until)
    )


def extend_waiting(connection: Connection, device: str, until: datetime) -> None:
    """Keeps the waiting tasks of a device that is alive but busy."""
    waiting = and_(tasks.c.device == device, tasks.c.state == "waiting", tasks.c.leased_until < until)
    connection.execute(update(tasks).where(waiting).values(leased_until=until))


def renew_leases(connection: Connection, run: str, number: int, kind: TaskKind, until: datetime) -> None:
    """Renews the leases of a round's live tasks, which devices could not renew while the coordinator was down."""
    early = and_(of_round(run, number, kind), tasks.c.state.in_(LIVE), tasks.c.leased_until < until)
    connection.execute(update(tasks).where(early).values(leased_until=until))


def end_task(
    connection: Connection, task: str, state: str, now: datetime, reason: str | None = None, message: str = ""
) -> None:
    """Ends a live task."""
    connection.execute(
        update(tasks)
        .where(tasks.c.id == task, tasks.c.state.in_(LIVE))
        .values(state=state, answered_at=now, reason=reason, words=message or None, leased_until=None)
    )


def end_live_tasks(
    connection: Connection,
    run: str,
    number: int,
    kind: TaskKind,
    state: str,
    now: datetime,
    *,
    reason: str,
    message: str,
    positions: Collection[int] | None = None,
) -> list[str]:
    """Ends all live tasks of a round, or those at `positions`, and returns their devices.

    The reason of a cancelled task that was leased is `LEFT_AT_WORK`.
    """
    live = and_(of_round(run, number, kind), tasks.c.state.in_(LIVE))
    rows = [
        row
        for row in connection.execute(
            select(tasks.c.id, tasks.c.device, tasks.c.position, tasks.c.state).where(live)
        )
        if positions is None or row.position in positions
    ]
    for row in rows:
        is_left = state == "cancelled" and row.state == "leased"
        end_task(connection, row.id, state, now, LEFT_AT_WORK if is_left else reason, message)
    return [row.device for row in rows]


def expire_leases(connection: Connection, run: str, number: int, kind: TaskKind, now: datetime) -> list[str]:
    """Ends the live tasks whose lease has expired, and returns their devices."""
    where = (of_round(run, number, kind), tasks.c.state.in_(LIVE), tasks.c.leased_until < now)
    expired = find_tasks(connection, *where)
    for task in expired:
        expire_lease(connection, task, now)
    return [task.device for task in expired]


def expire_lease(connection: Connection, task: TaskRow, now: datetime) -> None:
    """Ends a live task whose lease has expired."""
    message = (
        "it was silent for longer than its lease" if task.state == "leased" else "it did not fetch its task"
    )
    end_task(connection, task.id, "expired", now, "lease_expired", message)
    details: dict[str, Any] = {"round": task.round, "task": task.id, "kind": task.kind, "words": message}
    events.record(connection, now, "task_expired", run=task.run, device=task.device, **details)


def expire_tasks_of(connection: Connection, device: str, now: datetime, reason: str, message: str) -> None:
    """Ends the live tasks of a device that will not answer any more."""
    for task in live_tasks(connection, device):
        end_task(connection, task.id, "expired", now, reason, message)
        details: dict[str, Any] = {"round": task.round, "task": task.id, "kind": task.kind, "words": message}
        events.record(connection, now, "task_expired", run=task.run, device=device, **details)


def next_expiry(connection: Connection, run: str, number: int, kind: TaskKind) -> datetime | None:
    """When the next lease of the round expires; None without live tasks."""
    query = select(tasks.c.leased_until).where(of_round(run, number, kind), tasks.c.state.in_(LIVE))
    expiry: datetime | None = connection.execute(query.order_by(tasks.c.leased_until).limit(1)).scalar()
    return expiry


def ended_tasks(connection: Connection, run: str, number: int) -> list[EndedTask]:
    """Train tasks of a round that have ended, in that order; without cancelled ones."""
    query = select_ended().where(of_round(run, number, "train"))
    query = query.order_by(tasks.c.answered_at, tasks.c.position)
    return [EndedTask(**row._mapping) for row in connection.execute(query)]


def select_ended(*more: Column[Any]) -> Select[Any]:
    """Selects the fields of `EndedTask`, and `more` columns of tasks, of tasks that have ended and are not cancelled."""
    columns = (tasks.c[name] for name in ("device", "position", "state", "reason", "words", "answered_at"))
    payload_bytes = func.coalesce(updates.c.payload_bytes, uploads.c.size_bytes, 0).label("payload_bytes")
    return (
        select(*columns, updates.c.blob, payload_bytes, updates.c.figures, *more)
        .outerjoin(updates, _UPDATE_OF_TASK)
        .outerjoin(uploads, uploads.c.task == tasks.c.id)
        .where(tasks.c.state.in_(_ENDED))
    )


def cohort(connection: Connection, run: str, number: int) -> list[Row[Any]]:
    """The train tasks that a round may still take answers to or has taken, and those that started in it.

    By round and position, each with the size of its update or of the upload that has begun, if any.
    """
    untaken = and_(tasks.c.counted_in.is_(None), tasks.c.state == "accepted")
    counts = or_(tasks.c.round == number, tasks.c.counted_in == number, tasks.c.state.in_(LIVE), untaken)
    query = (
        select(
            *(
                tasks.c[name]
                for name in ("id", "device", "runtime", "state", "reason", "words", "answered_at")
            ),
            updates.c.payload_bytes,
            uploads.c.size_bytes,
        )
        .outerjoin(updates, _UPDATE_OF_TASK)
        .outerjoin(uploads, uploads.c.task == tasks.c.id)
        .where(tasks.c.run == run, tasks.c.kind == "train", counts)
    )
    return list(connection.execute(query.order_by(tasks.c.round, tasks.c.position)))


def live_task_ids(connection: Connection) -> set[str]:
    """All tasks that may still be answered."""
    return set(connection.execute(select(tasks.c.id).where(tasks.c.state.in_(LIVE))).scalars())


def devices_with_task(connection: Connection, run: str, number: int, kind: TaskKind) -> set[str]:
    """Devices that have a task of this kind in this round."""
    return set(connection.execute(select(tasks.c.device).where(of_round(run, number, kind))).scalars())


def of_round(run: str, number: int, kind: TaskKind) -> ColumnElement[bool]:
    """The tasks of one kind of a round."""
    return and_(tasks.c.run == run, tasks.c.round == number, tasks.c.kind == kind)


def blobs_in_use(connection: Connection) -> set[str]:
    """Blobs that open work needs: the downloads of live tasks, the updates of uncommitted rounds, what relays have folded; of asynchronous runs also the
    params that these started from, which may be compared with the newest ones."""
    used: set[str] = set()
    for offer in connection.execute(select(tasks.c.offer).where(tasks.c.state.in_(LIVE))).scalars():
        used |= blobs_of(offer)
    answered = and_(_UPDATE_OF_TASK, tasks.c.kind == "train")
    waiting = (
        select(updates.c.blob, tasks.c.offer)
        .join(tasks, answered)
        .join(runs, runs.c.id == updates.c.run)
        .outerjoin(rounds, and_(rounds.c.run == tasks.c.run, rounds.c.number == tasks.c.counted_in))
        .where(or_(tasks.c.counted_in.is_(None), rounds.c.state != "committed"), runs.c.state.in_(LIVE_RUNS))
    )
    for blob, offer in connection.execute(waiting):
        used |= {blob, offer["params"]["sha256"]} if offer.get("outlives_round") else {blob}
    folded = select(tasks.c.result).join(runs, runs.c.id == tasks.c.run)
    folded = folded.where(tasks.c.result.is_not(None), runs.c.state.in_(LIVE_RUNS))
    return used | set(connection.execute(folded).scalars())


def blobs_of(offer: Mapping[str, Any]) -> set[str]:
    """Hashes of the blobs that a task refers to."""
    refs = (offer.get(key) for key in ("params", "streams", "artifact", "manifest", "schema"))
    return {ref["sha256"] for ref in refs if ref is not None}


def last_task(connection: Connection, run: str, device: str) -> TaskRow | None:
    """The device's train task in the latest round that selected it."""
    query = _TASKS.where(tasks.c.run == run, tasks.c.device == device, tasks.c.kind == "train")
    row = connection.execute(query.order_by(tasks.c.round.desc()).limit(1)).one_or_none()
    return TaskRow(**row._mapping) if row is not None else None


_TASKS = select(
    *(tasks.c[each.name] for each in fields(TaskRow) if each.name in tasks.c),
    rounds.c.state.label("round_state"),
).outerjoin(rounds, and_(rounds.c.run == tasks.c.run, rounds.c.number == tasks.c.round))
