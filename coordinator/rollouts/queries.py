"""Queries of rollouts, their phases and their directions. Members have their own (`coordinator.rollouts.members`).

`rollout_directions` counts, per model, the changes to what its devices must run, and holds the count that the
repository last signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, select, update

from coordinator.errors import Refusal
from coordinator.rollouts.tables import (
    ROLLOUT_COLUMNS,
    MemberRow,
    PhaseRow,
    RolloutRow,
    rollout_directions,
    rollout_members,
    rollout_phases,
    rollouts,
)


def add(
    connection: Connection,
    rollout: RolloutRow,
    percents: Sequence[float],
    members: Iterable[MemberRow],
) -> None:
    """Inserts a rollout with its phases and members."""
    number = connection.execute(select(func.coalesce(func.max(rollouts.c.number), 0))).scalar_one() + 1
    connection.execute(insert(rollouts).values(**asdict(rollout), number=number))
    phases = [
        {"rollout": rollout.id, "number": at, "percent": percent} for at, percent in enumerate(percents)
    ]
    connection.execute(insert(rollout_phases), phases)
    if rows := [asdict(member) for member in members]:
        connection.execute(insert(rollout_members), rows)


def find(connection: Connection, rollout: str) -> RolloutRow | None:
    row = connection.execute(select(*ROLLOUT_COLUMNS).where(rollouts.c.id == rollout)).one_or_none()
    return RolloutRow(*row) if row is not None else None


def require(connection: Connection, rollout: str) -> RolloutRow:
    """The rollout of this id. Raises: Refusal: 404 `unknown_rollout`."""
    row = find(connection, rollout) if rollout.isprintable() else None
    if row is None:
        raise Refusal(
            404,
            "unknown_rollout",
            f"there is no rollout {rollout[:100]}; list the rollouts: fedloop rollout list",
        )
    return row


def newest(connection: Connection, limit: int, model: str | None = None) -> list[RolloutRow]:
    """Rollouts, newest first; of one model if given."""
    wanted = select(*ROLLOUT_COLUMNS).order_by(rollouts.c.number.desc()).limit(limit)
    if model is not None:
        wanted = wanted.where(rollouts.c.model == model)
    return [RolloutRow(*row) for row in connection.execute(wanted)]


def in_states(connection: Connection, states: Sequence[str], model: str | None = None) -> list[RolloutRow]:
    """Rollouts in one of these states, oldest first; of one model if given."""
    wanted = select(*ROLLOUT_COLUMNS).where(rollouts.c.state.in_(states)).order_by(rollouts.c.number)
    if model is not None:
        wanted = wanted.where(rollouts.c.model == model)
    return [RolloutRow(*row) for row in connection.execute(wanted)]


def change(connection: Connection, rollout: RolloutRow, now: datetime, **changed: Any) -> RolloutRow:
    """Updates these columns as of `now`; returns the changed rollout."""
    changed = {"since": now, **changed}
    connection.execute(update(rollouts).where(rollouts.c.id == rollout.id).values(**changed))
    return replace(rollout, **changed)


def open_phase(connection: Connection, rollout: str, number: int, now: datetime) -> None:
    """Marks the phase as opened and all earlier ones as passed."""
    _mark(connection, rollout, rollout_phases.c.number == number, "opened_at", now)
    _mark(connection, rollout, rollout_phases.c.number < number, "passed_at", now)


def mark_all_passed(connection: Connection, rollout: str, now: datetime) -> None:
    """Marks every phase as passed."""
    _mark(connection, rollout, rollout_phases.c.number >= 0, "passed_at", now)


def phases_of(connection: Connection, rollout: str) -> list[PhaseRow]:
    columns = [rollout_phases.c[each.name] for each in fields(PhaseRow)]
    query = select(*columns).where(rollout_phases.c.rollout == rollout).order_by(rollout_phases.c.number)
    return [PhaseRow(*row) for row in connection.execute(query)]


def bump_directions(connection: Connection, model: str) -> None:
    """Counts a change to what a model's devices must run; until it is signed, they hear nothing of the model."""
    bumped = (
        update(rollout_directions)
        .where(rollout_directions.c.model == model)
        .values(revision=rollout_directions.c.revision + 1)
    )
    if not connection.execute(bumped).rowcount:
        connection.execute(insert(rollout_directions).values(model=model, revision=1, signed=0))


def unsigned_revisions(connection: Connection) -> dict[str, int]:
    """Model -> revision of its directions, for models whose newest directions are not signed yet."""
    at = rollout_directions.c
    query = select(at.model, at.revision).where(at.revision != at.signed).order_by(at.model)
    return {row.model: row.revision for row in connection.execute(query)}


def mark_signed(connection: Connection, model: str, revision: int) -> None:
    """Records that the repository has signed this revision."""
    connection.execute(
        update(rollout_directions).where(rollout_directions.c.model == model).values(signed=revision)
    )


def _mark(
    connection: Connection, rollout: str, which: ColumnElement[bool], column: str, now: datetime
) -> None:
    unmarked = and_(rollout_phases.c.rollout == rollout, which, rollout_phases.c[column].is_(None))
    connection.execute(update(rollout_phases).where(unmarked).values({column: now}))
