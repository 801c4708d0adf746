"""Queries of secure aggregation on devices: the groups of a round, and the messages of their stages. Each is one step of a transaction.

A message of a stage is stored while the group's row has that stage, and the row goes on in the transaction that reads them: exactly the stored
ones count. So whoever reads the rows again comes to the same sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update

from coordinator.db.tables import find_row, secure_groups, secure_messages, tasks

_SHARES = 2
"""A device's message of the stage `shares`."""
REFUSED = -1
"""Stands for a kind of message: why a device was refused, or has left."""


@dataclass(frozen=True)
class GroupRow:
    """A group. `stage`: index in `wire.secure.STAGES`; one more than the last: all are over. `ended`: why it has no sum."""

    number: int
    stage: int
    opened_at: datetime
    ended: str | None


@dataclass(frozen=True)
class MemberRow:
    """A device in its round. `sent`: the kinds of its messages, of those that were asked for."""

    task: str
    device: str
    position: int
    state: str
    leased_until: datetime | None
    sent: Collection[int]


@dataclass(frozen=True)
class Message:
    """A stored message. `certificate`: with keys, PEM."""

    body: bytes
    certificate: str | None


def open_groups(connection: Connection, run: str, number: int, groups: int, now: datetime) -> None:
    """Adds the groups of a round that are not there, and deletes what is left of earlier rounds."""
    forget(connection, run, before=number)
    there = {each.number for each in find_groups(connection, run, number)}
    rows = [
        {"run": run, "round": number, "number": group, "stage": 0, "opened_at": now}
        for group in range(groups)
        if group not in there
    ]
    if rows:
        connection.execute(insert(secure_groups), rows)


def forget(connection: Connection, run: str, before: int | None = None) -> None:
    """Deletes the groups and messages of a run. `before`: those of earlier rounds only."""
    of_run, groups = tasks.c.run == run, secure_groups.c.run == run
    if before is not None:
        of_run, groups = of_run & (tasks.c.round < before), groups & (secure_groups.c.round < before)
    connection.execute(
        delete(secure_messages).where(secure_messages.c.task.in_(select(tasks.c.id).where(of_run)))
    )
    connection.execute(delete(secure_groups).where(groups))


def find_groups(connection: Connection, run: str, number: int) -> list[GroupRow]:
    columns = (secure_groups.c[name] for name in ("number", "stage", "opened_at", "ended"))
    query = select(*columns).where(secure_groups.c.run == run, secure_groups.c.round == number)
    return [GroupRow(**row._mapping) for row in connection.execute(query.order_by(secure_groups.c.number))]


def find_group(connection: Connection, run: str, number: int, group: int) -> GroupRow | None:
    return find_row(connection, GroupRow, secure_groups, *_one(run, number, group))


def close_stage(connection: Connection, run: str, number: int, group: int, stage: int, now: datetime) -> None:
    """Ends this stage of a group: no message of it is stored from now on."""
    connection.execute(
        update(secure_groups)
        .where(*_one(run, number, group), secure_groups.c.stage == stage)
        .values(stage=stage + 1, opened_at=now)
    )


def end_group(connection: Connection, run: str, number: int, group: int, why: str) -> None:
    """Records that a group has no sum."""
    connection.execute(update(secure_groups).where(*_one(run, number, group)).values(ended=why))


def leave(connection: Connection, task: str, why: str) -> None:
    """Has the device of a task leave its group, whose later stages do not wait for it then."""
    put(connection, task, REFUSED, why.encode())


def members(connection: Connection, run: str, number: int, kinds: Collection[int]) -> list[MemberRow]:
    """The devices of a round, by position. `kinds`: of messages to look for."""
    sent: dict[str, set[int]] = {}
    of_kinds = (
        select(secure_messages.c.task, secure_messages.c.kind)
        .join(tasks, tasks.c.id == secure_messages.c.task)
        .where(_trained(run, number), secure_messages.c.kind.in_(kinds))
    )
    for task, kind in connection.execute(of_kinds):
        sent.setdefault(task, set()).add(kind)
    columns = (tasks.c[name] for name in ("id", "device", "position", "state", "leased_until"))
    query = select(*columns).where(_trained(run, number)).order_by(tasks.c.position)
    return [
        MemberRow(row.id, row.device, row.position, row.state, row.leased_until, sent.get(row.id, ()))
        for row in connection.execute(query)
    ]


def put(connection: Connection, task: str, kind: int, body: bytes, certificate: str | None = None) -> None:
    """Stores a message, in place of an earlier one."""
    connection.execute(delete(secure_messages).where(*_of(task, kind)))
    connection.execute(
        insert(secure_messages).values(task=task, kind=kind, body=body, certificate=certificate)
    )


def find(connection: Connection, task: str, kind: int) -> Message | None:
    return find_row(connection, Message, secure_messages, *_of(task, kind))


def has_shared(connection: Connection, task: str) -> bool:
    """Whether the device of a task has shared its secrets with its group, and is still in it."""
    return find(connection, task, _SHARES) is not None and find(connection, task, REFUSED) is None


def messages(connection: Connection, of: Collection[str], kind: int) -> Mapping[str, Message]:
    """The messages of one kind of these tasks, by task."""
    query = select(secure_messages).where(secure_messages.c.task.in_(of), secure_messages.c.kind == kind)
    return {row.task: Message(row.body, row.certificate) for row in connection.execute(query)}


def certificates(connection: Connection, run: str, number: int, devices: Collection[str]) -> dict[str, str]:
    """The certificates with which these devices have signed their keys, PEM by device."""
    query = (
        select(tasks.c.device, secure_messages.c.certificate)
        .join(tasks, tasks.c.id == secure_messages.c.task)
        .where(_trained(run, number), tasks.c.device.in_(devices))
        .where(secure_messages.c.certificate.is_not(None))
    )
    return {row.device: row.certificate for row in connection.execute(query)}


def bytes_exchanged(connection: Connection, run: str, number: int, *, up: bool) -> dict[str, int]:
    """Bytes of the messages that each device of a round has sent, without its masked update, or of those for it."""
    query = (
        select(tasks.c.device, func.sum(func.length(secure_messages.c.body)))
        .join(tasks, tasks.c.id == secure_messages.c.task)
        .where(_trained(run, number), secure_messages.c.kind % 2 == (0 if up else 1))
        .group_by(tasks.c.device)
    )
    return {device: int(size) for device, size in connection.execute(query)}


def _of(task: str, kind: int) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return secure_messages.c.task == task, secure_messages.c.kind == kind


def _trained(run: str, number: int) -> ColumnElement[bool]:
    """The tasks to train of a round."""
    return and_(tasks.c.run == run, tasks.c.round == number, tasks.c.kind == "train")


def _one(run: str, number: int, group: int) -> tuple[ColumnElement[bool], ...]:
    return secure_groups.c.run == run, secure_groups.c.round == number, secure_groups.c.number == group
