"""Aliases of the model registry: which version a name such as `champion` refers to, and its history."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select, update

from coordinator.db import events
from coordinator.db.registry import VersionId
from coordinator.db.registry_tables import model_alias_moves, model_aliases


@dataclass(frozen=True)
class AliasMove:
    """One change of an alias. `before` is None for a new alias, `number` for a removed one."""

    alias: str
    before: int | None
    number: int | None
    moved_at: datetime


def resolve(connection: Connection, model: str, alias: str) -> VersionId | None:
    """The version that an alias refers to now."""
    a = model_aliases.c
    number = connection.execute(
        select(a.number).where(a.model == model, a.alias == alias)
    ).scalar_one_or_none()
    return None if number is None else VersionId(model, number)


def move(connection: Connection, identity: VersionId, alias: str, now: datetime) -> AliasMove:
    """Points an alias to this version, which must exist, and records the change in its history."""
    before = resolve(connection, identity.model, alias)
    change = AliasMove(alias, before.number if before else None, identity.number, now)
    if before == identity:
        return change
    a = model_aliases.c
    if before is None:
        place = {"model": identity.model, "alias": alias}
        connection.execute(insert(model_aliases).values(**place, number=identity.number, moved_at=now))
    else:
        connection.execute(
            update(model_aliases)
            .where(a.model == identity.model, a.alias == alias)
            .values(number=identity.number, moved_at=now)
        )
    _record_move(connection, identity.model, change)
    return change


def remove(connection: Connection, model: str, alias: str, now: datetime) -> AliasMove | None:
    """Removes an alias; None if there was none."""
    before = resolve(connection, model, alias)
    if before is None:
        return None
    a = model_aliases.c
    connection.execute(delete(model_aliases).where(a.model == model, a.alias == alias))
    change = AliasMove(alias, before.number, None, now)
    _record_move(connection, model, change)
    return change


def moves(connection: Connection, model: str, limit: int, alias: str | None = None) -> list[AliasMove]:
    """At most `limit` changes of a model's aliases, or of one of them, latest first."""
    m = model_alias_moves.c
    wanted = select(m.alias, m.before, m.number, m.moved_at).where(m.model == model)
    if alias is not None:
        wanted = wanted.where(m.alias == alias)
    return [AliasMove(*row) for row in connection.execute(wanted.order_by(m.id.desc()).limit(limit))]


def _record_move(connection: Connection, model: str, change: AliasMove) -> None:
    connection.execute(insert(model_alias_moves).values(model=model, **vars(change)))
    events.record(
        connection,
        change.moved_at,
        "model_alias_moved",
        model=model,
        alias=change.alias,
        version=change.number,
        before=change.before,
    )
