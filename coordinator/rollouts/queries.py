"""Queries of rollouts, their phases, their members and their directions.

A member's row holds what the device was told and what it reported; `coordinator.rollouts.engine` derives what it must
run from that row and the rollout's. `rollout_directions` counts, per model, the changes to what its devices must run, and
holds the count that the repository last signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, func, insert, select, update

from coordinator.db.project_filter import working_for
from coordinator.db.tables import columns_of, devices, find_row
from coordinator.errors import Refusal
from coordinator.rollouts.gates import Tally
from coordinator.rollouts.tables import (
    MEMBER_COLUMNS,
    ROLLOUT_COLUMNS,
    FailureRow,
    MemberRow,
    PhaseRow,
    RolloutRow,
    Standing,
    rollout_directions,
    rollout_members,
    rollout_phases,
    rollouts,
)
from coordinator.rounds.pooling import label_cap

RECENT_ROLLOUTS = 8
"""Newest rollouts of a model that direct devices; a long history costs nothing."""


def add(
    connection: Connection,
    rollout: RolloutRow,
    percents: Sequence[float],
    members: Iterable[MemberRow],
) -> None:
    """Inserts a rollout with its phases and members."""
    with working_for(connection, None):  # numbers are those of the whole coordinator
        number = connection.execute(select(func.coalesce(func.max(rollouts.c.number), 0))).scalar_one() + 1
    connection.execute(insert(rollouts).values(**asdict(rollout), number=number))
    phases = [
        {"rollout": rollout.id, "number": at, "percent": percent} for at, percent in enumerate(percents)
    ]
    connection.execute(insert(rollout_phases), phases)
    if rows := [asdict(member) for member in members]:
        connection.execute(insert(rollout_members), rows)


def find(connection: Connection, rollout: str) -> RolloutRow | None:
    return find_row(connection, RolloutRow, rollouts, rollouts.c.id == rollout)


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
    """Marks the phase as opened, if there is one of this number, and all earlier ones as passed."""
    _mark(connection, rollout, rollout_phases.c.number == number, "opened_at", now)
    _mark(connection, rollout, rollout_phases.c.number < number, "passed_at", now)


def phases_of(connection: Connection, rollout: str) -> list[PhaseRow]:
    query = (
        select(*columns_of(rollout_phases, PhaseRow))
        .where(rollout_phases.c.rollout == rollout)
        .order_by(rollout_phases.c.number)
    )
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


def find_member(connection: Connection, rollout: str, device: str) -> MemberRow | None:
    key = (rollout_members.c.rollout == rollout, rollout_members.c.device == device)
    return find_row(connection, MemberRow, rollout_members, *key)


def members_of(
    connection: Connection, rollout: str, standing: Sequence[str] | None = None, limit: int | None = None
) -> list[MemberRow]:
    """Members by phase and id; only those in one of these standings, if given."""
    query = select(*MEMBER_COLUMNS).where(rollout_members.c.rollout == rollout)
    if standing is not None:
        query = query.where(rollout_members.c.standing.in_(standing))
    query = query.order_by(rollout_members.c.phase, rollout_members.c.device).limit(limit)
    return [MemberRow(*row) for row in connection.execute(query)]


def of_device(connection: Connection, device: str) -> list[tuple[RolloutRow, MemberRow]]:
    """The device's memberships in recent rollouts, newest rollout first."""
    return _pairs(connection, rollout_members.c.device == device)


def of_model(connection: Connection, model: str) -> list[tuple[RolloutRow, MemberRow]]:
    """Every member of a model's recent rollouts, newest rollout first, devices by id."""
    return _pairs(connection, rollouts.c.model == model)


def save_member(connection: Connection, member: MemberRow) -> None:
    """Updates the member's row."""
    key = (rollout_members.c.rollout == member.rollout) & (rollout_members.c.device == member.device)
    connection.execute(update(rollout_members).where(key).values(asdict(member)))


def failed_before(connection: Connection, model: str, version: int) -> set[str]:
    """Devices whose latest report on this release is a failure."""
    query = (
        select(rollout_members.c.device, rollout_members.c.standing)
        .join(rollouts, rollouts.c.id == rollout_members.c.rollout)
        .where(rollouts.c.model == model, rollouts.c.version == version)
        .where(rollout_members.c.standing != "waiting")
        .order_by(rollouts.c.number)
    )
    last = {row.device: row.standing for row in connection.execute(query)}
    return {device for device, standing in last.items() if standing in ("failed", "barred")}


def tallies(connection: Connection, rollout: str) -> dict[int, Tally]:
    """Phase number -> its figures, over devices that may still take part; phases without any are left out.

    In the comparison no device counts for more labels than the median device has (`coordinator.rounds.pooling`).
    """
    at = rollout_members.c
    by_standing = [_count(at.standing == each) for each in ("installing", "active", "failed", "rolled_back")]
    takes_part = and_(at.rollout == rollout, at.standing != "barred", devices.c.state == "active")
    compared = at.champion_correct.is_not(None)
    most = _label_cap(connection, and_(takes_part, compared))
    weight = case((at.labels > most, float(most) / at.labels), else_=1.0)
    summed = ("labels", "correct", "loss_sum", "champion_correct", "champion_loss_sum")
    query = (
        select(
            at.phase,
            func.count(),
            *by_standing,
            _count(at.golden_accuracy.is_not(None)),
            func.coalesce(func.sum(at.golden_accuracy), 0.0),
            *(func.coalesce(func.sum(case((compared, at[name] * weight))), 0.0) for name in summed),
        )
        .join(devices, devices.c.id == at.device)
        .where(takes_part)
        .group_by(at.phase)
    )
    return {row[0]: Tally(*row[1:]) for row in connection.execute(query)}


def standings(connection: Connection, rollout: str) -> dict[tuple[int, str], int]:
    """(phase, standing) -> number of members, including revoked devices."""
    at = rollout_members.c
    query = select(at.phase, at.standing, func.count()).where(at.rollout == rollout)
    return {(row[0], row[1]): row[2] for row in connection.execute(query.group_by(at.phase, at.standing))}


def outstanding(connection: Connection, rollout: str) -> int:
    """Number of active devices that may have the release and have not confirmed that they rolled back."""
    at = rollout_members.c
    query = (
        select(func.count())
        .select_from(rollout_members)
        .join(devices, devices.c.id == at.device)
        .where(at.rollout == rollout, devices.c.state == "active")
        .where(at.told.is_not(None))
        .where(at.standing.in_(("waiting", "installing", "active")))
    )
    return int(connection.execute(query).scalar_one())


def failures(connection: Connection, rollout: str) -> list[FailureRow]:
    """Why devices could not run the release."""
    return _reasons(connection, rollout, ("failed", "barred"))


def rollback_failures(connection: Connection, rollout: str) -> list[FailureRow]:
    """Why devices that were told to roll back still run the release, as far as they report a reason."""
    return [each for each in _reasons(connection, rollout, ("active",)) if each.code]


def _reasons(
    connection: Connection, rollout: str, standings: Sequence[Standing], limit: int = 50
) -> list[FailureRow]:
    """Reasons of devices in these standings, most frequent first; devices choose the codes, so at most `limit`."""
    at = rollout_members.c
    reason = func.coalesce(at.code, "")
    query = (
        select(reason, func.count().label("devices"), func.min(at.device).label("device"))
        .where(at.rollout == rollout, at.standing.in_(standings))
        .group_by(reason)
        .order_by(func.count().desc(), reason)
        .limit(limit)
    )
    rows = connection.execute(query).all()
    examples = select(at.device, at.words).where(
        at.rollout == rollout, at.device.in_([row.device for row in rows])
    )
    messages = {row.device: row.words or "" for row in connection.execute(examples)}
    return [FailureRow(row[0], row.devices, row.device, messages[row.device]) for row in rows]


def devices_to_wake(connection: Connection, model: str) -> list[str]:
    """Devices in the model's rollouts that have yet to act on their direction."""
    at = rollout_members.c
    query = (
        select(at.device)
        .distinct()
        .join(rollouts, rollouts.c.id == at.rollout)
        .where(rollouts.c.model == model)
        .where(
            (
                (at.standing == "waiting")
                & rollouts.c.state.in_(("running", "finished"))
                & (at.phase <= rollouts.c.phase)
            )
            | ((at.standing == "active") & rollouts.c.state.in_(("halted", "aborted")))
        )
    )
    return list(connection.execute(query).scalars())


def _pairs(connection: Connection, which: ColumnElement[bool]) -> list[tuple[RolloutRow, MemberRow]]:
    age = func.row_number().over(partition_by=rollouts.c.model, order_by=rollouts.c.number.desc())
    recent = select(rollouts.c.id, age.label("age")).subquery()
    query = (
        select(*ROLLOUT_COLUMNS, *MEMBER_COLUMNS)
        .join(rollout_members, rollout_members.c.rollout == rollouts.c.id)
        .join(recent, recent.c.id == rollouts.c.id)
        .where(which, recent.c.age <= RECENT_ROLLOUTS)
        .order_by(rollouts.c.number.desc(), rollout_members.c.device)
    )
    at = len(ROLLOUT_COLUMNS)
    return [(RolloutRow(*row[:at]), MemberRow(*row[at:])) for row in connection.execute(query)]


def _label_cap(connection: Connection, which: ColumnElement[bool]) -> int:
    """The most labels that one of these members counts for; 0 without members."""
    labels = (
        select(rollout_members.c.labels).join(devices, devices.c.id == rollout_members.c.device).where(which)
    )
    counts = connection.execute(labels).scalars().all()
    return label_cap(counts) if counts else 0


def _count(which: ColumnElement[bool]) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((which, 1), else_=0)), 0)


def _mark(
    connection: Connection, rollout: str, which: ColumnElement[bool], column: str, now: datetime
) -> None:
    unmarked = and_(rollout_phases.c.rollout == rollout, which, rollout_phases.c[column].is_(None))
    connection.execute(update(rollout_phases).where(unmarked).values({column: now}))
