"""Rollouts, their phases, their members and how these stand. Tables and queries.

A member's row says what it was told and what it answered; what it is to run follows from that row and the rollout's
(`coordinator.rollouts.engine`). `directions` counts, for each model, the changes in who is to run what, and
which of them the signed repository says too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    ForeignKey,
    Integer,
    Row,
    String,
    Table,
    Text,
    and_,
    case,
    func,
    insert,
    select,
    update,
)

from coordinator.db.tables import UTCDateTime, devices, metadata
from coordinator.pooling import label_cap
from coordinator.rollouts.gates import Gates, Tally

State = Literal["created", "running", "paused", "halted", "rolled_back", "aborted", "finished"]
Standing = Literal["waiting", "installing", "active", "failed", "rolled_back", "barred"]
Action = Literal["install", "roll_back"]

GOES_ON = ("created", "running", "paused")
"""States in which a model's next rollout has to wait."""

REMEMBERED = 8
"""Newest rollouts of a model that say what devices are to run: so that a long history costs nothing."""

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", String(36), primary_key=True),
    Column(
        "number", Integer, nullable=False, unique=True
    ),  # in the order they were made, whatever the clock said
    Column("model", String(63), nullable=False, index=True),
    Column("version", Integer, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("phase", Integer, nullable=False),  # the last opened one; -1: none
    Column("keep", Boolean, nullable=False),  # aborted, and who has it keeps it
    Column("reason", Text, nullable=True),
    Column("salt", String(32), nullable=False),
    Column("filter", JSON, nullable=False),  # rollouts.plan.Filter
    Column("gates", JSON, nullable=False),  # rollouts.gates.Gates
    Column("created_at", UTCDateTime, nullable=False),
    Column("since", UTCDateTime, nullable=False),  # when the state or the phase last changed
)

rollout_phases = Table(
    "rollout_phases",
    metadata,
    Column("rollout", String(36), ForeignKey("rollouts.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("percent", Float, nullable=False),
    Column("opened_at", UTCDateTime, nullable=True),
    Column("passed_at", UTCDateTime, nullable=True),
)

rollout_members = Table(
    "rollout_members",
    metadata,
    Column("rollout", String(36), ForeignKey("rollouts.id"), primary_key=True),
    Column("device", String(36), ForeignKey("devices.id"), primary_key=True, index=True),
    Column("phase", Integer, nullable=False),
    Column("standing", String(16), nullable=False),
    Column("told", String(16), nullable=True),  # install | roll_back: what it was last told
    Column("previous", Integer, nullable=True),  # version it ran when it was told; null: none
    Column("force", Boolean, nullable=False),
    Column("code", String(40), nullable=True),
    Column("words", Text, nullable=True),
    Column("golden_accuracy", Float, nullable=True),
    Column("labels", Float, nullable=True),
    Column("correct", Float, nullable=True),
    Column("loss_sum", Float, nullable=True),
    Column("champion_correct", Float, nullable=True),
    Column("champion_loss_sum", Float, nullable=True),
    Column("changed_at", UTCDateTime, nullable=False),
)

rollout_directions = Table(
    "rollout_directions",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("revision", Integer, nullable=False),
    Column("signed", Integer, nullable=False),  # the revision that the repository has
)


@dataclass(frozen=True)
class RolloutRow:
    """A rollout as the table has it."""

    id: str
    model: str
    version: int
    state: State
    phase: int
    keep: bool
    reason: str | None
    salt: str
    filter: Mapping[str, Any]
    gates: Mapping[str, Any]
    created_at: datetime
    since: datetime

    @property
    def gate_values(self) -> Gates:
        return Gates(**self.gates)


@dataclass(frozen=True)
class MemberRow:
    """A device in a rollout. Figures of the comparison are there where the device had a champion to compare with."""

    rollout: str
    device: str
    phase: int
    standing: Standing
    changed_at: datetime
    told: Action | None = None
    previous: int | None = None
    force: bool = False
    code: str | None = None
    words: str | None = None
    golden_accuracy: float | None = None
    labels: float | None = None
    correct: float | None = None
    loss_sum: float | None = None
    champion_correct: float | None = None
    champion_loss_sum: float | None = None


@dataclass(frozen=True)
class PhaseRow:
    """A phase of a rollout; `percent` of the devices have the release when it is over."""

    number: int
    percent: float
    opened_at: datetime | None
    passed_at: datetime | None


@dataclass(frozen=True)
class FailureRow:
    """Devices that failed for one reason; `device` is one of them, `words` are its own."""

    code: str
    devices: int
    device: str
    words: str


def add(
    connection: Connection,
    rollout: RolloutRow,
    percents: Sequence[float],
    members: Iterable[MemberRow],
) -> None:
    """A new rollout with all that stays fixed."""
    number = connection.execute(select(func.coalesce(func.max(rollouts.c.number), 0))).scalar_one() + 1
    connection.execute(insert(rollouts).values(**asdict(rollout), number=number))
    each = [{"rollout": rollout.id, "number": at, "percent": percent} for at, percent in enumerate(percents)]
    connection.execute(insert(rollout_phases), each)
    if rows := [asdict(member) for member in members]:
        connection.execute(insert(rollout_members), rows)


def find(connection: Connection, rollout: str) -> RolloutRow | None:
    row = connection.execute(select(*_ROLLOUT).where(rollouts.c.id == rollout)).one_or_none()
    return RolloutRow(*row) if row is not None else None


def newest(connection: Connection, limit: int, model: str | None = None) -> list[RolloutRow]:
    """Rollouts, the newest first; of one model if asked."""
    wanted = select(*_ROLLOUT).order_by(rollouts.c.number.desc()).limit(limit)
    if model is not None:
        wanted = wanted.where(rollouts.c.model == model)
    return [RolloutRow(*row) for row in connection.execute(wanted)]


def in_states(connection: Connection, states: Sequence[str], model: str | None = None) -> list[RolloutRow]:
    """Rollouts in one of these states, the oldest first; of one model if asked."""
    wanted = select(*_ROLLOUT).where(rollouts.c.state.in_(states)).order_by(rollouts.c.number)
    if model is not None:
        wanted = wanted.where(rollouts.c.model == model)
    return [RolloutRow(*row) for row in connection.execute(wanted)]


def change(connection: Connection, rollout: RolloutRow, now: datetime, **changed: Any) -> RolloutRow:
    """The rollout with these columns changed, as of now."""
    changed = {"since": now, **changed}
    connection.execute(update(rollouts).where(rollouts.c.id == rollout.id).values(**changed))
    return replace(rollout, **changed)


def open_phase(connection: Connection, rollout: str, number: int, now: datetime) -> None:
    """Marks the phase as opened, and those before it as passed."""
    _mark(connection, rollout, rollout_phases.c.number == number, "opened_at", now)
    _mark(connection, rollout, rollout_phases.c.number < number, "passed_at", now)


def pass_all(connection: Connection, rollout: str, now: datetime) -> None:
    """Marks every phase as passed."""
    _mark(connection, rollout, rollout_phases.c.number >= 0, "passed_at", now)


def phases_of(connection: Connection, rollout: str) -> list[PhaseRow]:
    columns = [rollout_phases.c[each.name] for each in fields(PhaseRow)]
    query = select(*columns).where(rollout_phases.c.rollout == rollout).order_by(rollout_phases.c.number)
    return [PhaseRow(*row) for row in connection.execute(query)]


def member(connection: Connection, rollout: str, device: str) -> MemberRow | None:
    query = select(*_MEMBER).where(rollout_members.c.rollout == rollout, rollout_members.c.device == device)
    row = connection.execute(query).one_or_none()
    return MemberRow(*row) if row is not None else None


def members_of(
    connection: Connection, rollout: str, standing: Sequence[str] | None = None, limit: int | None = None
) -> list[MemberRow]:
    """Members by phase and id; only those that stand so, if asked."""
    query = select(*_MEMBER).where(rollout_members.c.rollout == rollout)
    if standing is not None:
        query = query.where(rollout_members.c.standing.in_(standing))
    query = query.order_by(rollout_members.c.phase, rollout_members.c.device).limit(limit)
    return [MemberRow(*row) for row in connection.execute(query)]


def of_device(connection: Connection, device: str) -> list[tuple[RolloutRow, MemberRow]]:
    """The rollouts that a device is a member of, of those that count, the newest first."""
    return _pairs(connection, rollout_members.c.device == device)


def of_model(connection: Connection, model: str) -> list[tuple[RolloutRow, MemberRow]]:
    """Every member of those rollouts of a model that count, the newest rollout first, devices by id."""
    return _pairs(connection, rollouts.c.model == model)


def save_member(connection: Connection, member: MemberRow) -> None:
    """Writes what changed of a member."""
    key = (rollout_members.c.rollout == member.rollout) & (rollout_members.c.device == member.device)
    connection.execute(update(rollout_members).where(key).values(asdict(member)))


def failed_before(connection: Connection, model: str, version: int) -> set[str]:
    """Devices whose last word on this release is that they could not run it."""
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
    """Figures by number of phase, of devices that may still take part; phases without any are left out.

    In the comparison no device counts for more labels than the median one has (`coordinator.pooling`).
    """
    at = rollout_members.c
    took_part = [_count(at.standing == each) for each in ("installing", "active", "failed", "rolled_back")]
    takes_part = and_(at.rollout == rollout, at.standing != "barred", devices.c.state == "active")
    compared = at.champion_correct.is_not(None)
    most = _label_cap(connection, and_(takes_part, compared))
    weight = case((at.labels > most, float(most) / at.labels), else_=1.0)
    summed = ("labels", "correct", "loss_sum", "champion_correct", "champion_loss_sum")
    query = (
        select(
            at.phase,
            func.count(),
            *took_part,
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
    """Number of members by phase and standing, shut-out devices among them."""
    at = rollout_members.c
    query = select(at.phase, at.standing, func.count()).where(at.rollout == rollout)
    return {(row[0], row[1]): row[2] for row in connection.execute(query.group_by(at.phase, at.standing))}


def outstanding(connection: Connection, rollout: str) -> int:
    """Devices that may have the release, and are yet to say that they went back to what they had before."""
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


def failures(connection: Connection, rollout: str, limit: int = 50) -> list[FailureRow]:
    """Why devices could not run it, the most frequent reason first; the codes are the devices' own, so at most `limit`."""
    at = rollout_members.c
    reason = func.coalesce(at.code, "")
    query = (
        select(reason, func.count().label("devices"), func.min(at.device).label("device"))
        .where(at.rollout == rollout, at.standing.in_(("failed", "barred")))
        .group_by(reason)
        .order_by(func.count().desc(), reason)
        .limit(limit)
    )
    found = connection.execute(query).all()
    said = select(at.device, at.words).where(
        at.rollout == rollout, at.device.in_([row.device for row in found])
    )
    words = {row.device: row.words or "" for row in connection.execute(said)}
    return [FailureRow(row[0], row.devices, row.device, words[row.device]) for row in found]


def to_wake(connection: Connection, model: str) -> list[str]:
    """Devices of the model's rollouts that have yet to answer to what they are to be told."""
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


def redirect(connection: Connection, model: str) -> None:
    """Counts a change in who is to run what of a model: until it is signed, nobody is told anything of it."""
    bumped = (
        update(rollout_directions)
        .where(rollout_directions.c.model == model)
        .values(revision=rollout_directions.c.revision + 1)
    )
    if not connection.execute(bumped).rowcount:
        connection.execute(insert(rollout_directions).values(model=model, revision=1, signed=0))


def unsigned(connection: Connection) -> dict[str, int]:
    """Models whose directions the repository does not say yet, with the revision to be signed."""
    at = rollout_directions.c
    query = select(at.model, at.revision).where(at.revision != at.signed).order_by(at.model)
    return {row.model: row.revision for row in connection.execute(query)}


def signed(connection: Connection, model: str, revision: int) -> None:
    """The repository says the directions of this revision."""
    connection.execute(
        update(rollout_directions).where(rollout_directions.c.model == model).values(signed=revision)
    )


_ROLLOUT: Sequence[ColumnElement[Any]] = [rollouts.c[each.name] for each in fields(RolloutRow)]
_MEMBER: Sequence[ColumnElement[Any]] = [rollout_members.c[each.name] for each in fields(MemberRow)]


def _pairs(connection: Connection, which: ColumnElement[bool]) -> list[tuple[RolloutRow, MemberRow]]:
    age = func.row_number().over(partition_by=rollouts.c.model, order_by=rollouts.c.number.desc())
    recent = select(rollouts.c.id, age.label("age")).subquery()
    query = (
        select(*_ROLLOUT, *_MEMBER)
        .join(rollout_members, rollout_members.c.rollout == rollouts.c.id)
        .join(recent, recent.c.id == rollouts.c.id)
        .where(which, recent.c.age <= REMEMBERED)
        .order_by(rollouts.c.number.desc(), rollout_members.c.device)
    )
    return [_pair(row) for row in connection.execute(query)]


def _pair(row: Row[Any]) -> tuple[RolloutRow, MemberRow]:
    return RolloutRow(*row[: len(_ROLLOUT)]), MemberRow(*row[len(_ROLLOUT) :])


def _label_cap(connection: Connection, which: ColumnElement[bool]) -> int:
    """The most labels that one of these members counts for; 0 where there is none."""
    labels = (
        select(rollout_members.c.labels).join(devices, devices.c.id == rollout_members.c.device).where(which)
    )
    found = connection.execute(labels).scalars().all()
    return label_cap(found) if found else 0


def _count(which: ColumnElement[bool]) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((which, 1), else_=0)), 0)


def _mark(
    connection: Connection, rollout: str, which: ColumnElement[bool], column: str, now: datetime
) -> None:
    unmarked = and_(rollout_phases.c.rollout == rollout, which, rollout_phases.c[column].is_(None))
    connection.execute(update(rollout_phases).where(unmarked).values({column: now}))
