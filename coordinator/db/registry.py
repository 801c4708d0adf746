"""The model registry in the database: tables and queries. Each function is a step of one transaction.

    models ─► model_versions ─► model_files     blobs, by path; a version is never changed
                     │     └──► model_inputs    what it was made from: data and params by hash, runs by id
                     │     └──► model_metrics   figures of each stage
                     └─ model_aliases           which version a name such as `champion` means now
                        model_alias_moves       and what it meant before

Versions are linked by hashes alone: an input of relation `params` is the SHA-256 of a file of its parent, so the
graph is the same in whatever order versions were registered, and whoever replaces a file breaks the link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    String,
    Table,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.db import events
from coordinator.db.tables import UTCDateTime, metadata

Relation = Literal["data", "params", "run"]
"""What an input is: a data set by its fingerprint, a file of params by its hash, a federated run by its id."""

models = Table(
    "models",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("latest", Integer, nullable=False),  # number of the newest version; numbers are never used twice
    Column("created_at", UTCDateTime, nullable=False),
)

model_versions = Table(
    "model_versions",
    metadata,
    Column("model", String(63), ForeignKey("models.name"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),  # params | compressed | inference | weights | tflite | onnx
    Column("stage", String(16), nullable=False),  # pretrain | run | compress | release | import
    Column("content_sha256", String(64), nullable=False),  # of paths and hashes of all files
    Column("about", JSON, nullable=False),  # architecture, options, configuration
    Column("created_at", UTCDateTime, nullable=False),
    Index("ix_model_versions_content", "model", "content_sha256", unique=True),
)

model_files = Table(
    "model_files",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("path", String(300), primary_key=True),
    Column("sha256", String(64), nullable=False, index=True),
    Column("size_bytes", BigInteger, nullable=False),
    ForeignKeyConstraint(["model", "number"], ["model_versions.model", "model_versions.number"]),
)

model_inputs = Table(
    "model_inputs",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("relation", String(16), primary_key=True),
    Column("ref", String(64), primary_key=True),
    ForeignKeyConstraint(["model", "number"], ["model_versions.model", "model_versions.number"]),
    Index("ix_model_inputs_ref", "ref"),
)

model_metrics = Table(
    "model_metrics",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("stage", String(40), primary_key=True),
    Column("figures", JSON, nullable=False),  # name -> number
    Column("recorded_at", UTCDateTime, nullable=False),
    ForeignKeyConstraint(["model", "number"], ["model_versions.model", "model_versions.number"]),
)

model_aliases = Table(
    "model_aliases",
    metadata,
    Column("model", String(63), primary_key=True),
    Column("alias", String(63), primary_key=True),
    Column("number", Integer, nullable=False),
    Column("moved_at", UTCDateTime, nullable=False),
    ForeignKeyConstraint(["model", "number"], ["model_versions.model", "model_versions.number"]),
)

model_alias_moves = Table(
    "model_alias_moves",
    metadata,
    Column(
        "id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    ),  # in the order of commit
    Column("model", String(63), ForeignKey("models.name"), nullable=False),
    Column("alias", String(63), nullable=False),
    Column("before", Integer, nullable=True),
    Column("number", Integer, nullable=True),  # null: it was taken away
    Column("moved_at", UTCDateTime, nullable=False),
    Index("ix_model_alias_moves_alias", "model", "alias"),
)


@dataclass(frozen=True, order=True)
class VersionId:
    """A version, written `name:number`."""

    model: str
    number: int

    def __str__(self) -> str:
        return f"{self.model}:{self.number}"


@dataclass(frozen=True)
class FileRow:
    """A file of a version: its path within the version's folder, and the blob."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, order=True)
class Input:
    """What a version was made from. `ref` is a fingerprint, a hash or an id, as `relation` says."""

    relation: Relation
    ref: str


@dataclass(frozen=True)
class NewVersion:
    """What there is to say of a version before it has a number. `metrics`: stage -> name -> number."""

    kind: str
    stage: str
    content_sha256: str
    files: Sequence[FileRow]
    inputs: Sequence[Input] = ()
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VersionRow:
    """A registered version with all that belongs to it. `aliases` are those that mean it now."""

    id: VersionId
    kind: str
    stage: str
    content_sha256: str
    about: Mapping[str, Any]
    created_at: datetime
    files: tuple[FileRow, ...]
    inputs: tuple[Input, ...]
    metrics: Mapping[str, Mapping[str, float]]
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class ModelRow:
    """A model: its newest number, and what its aliases mean."""

    name: str
    latest: int
    created_at: datetime
    aliases: Mapping[str, int]


@dataclass(frozen=True)
class AliasMove:
    """One change of an alias; None where there was none before, or it was taken away."""

    alias: str
    before: int | None
    number: int | None
    moved_at: datetime


def add(
    connection: Connection, model: str, version: NewVersion, now: datetime, number: int | None = None
) -> VersionId | None:
    """Writes down a version under the next number of its model, which is made where there is none.

    `number` is the one it must get; None is returned, and nothing written, where another one is next.
    """
    row = {"name": model, "latest": 0, "created_at": now}
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(models).values(row).on_conflict_do_nothing())
    # Taking the number locks the model's row, so of two writers the second waits and takes the next one.
    taking = update(models).where(models.c.name == model)
    if number is not None:
        taking = taking.where(models.c.latest == number - 1)
    taken = connection.execute(taking.values(latest=models.c.latest + 1).returning(models.c.latest))
    given = taken.scalar_one_or_none()
    if given is None:
        return None
    place = {"model": model, "number": given}
    connection.execute(
        insert(model_versions).values(
            **place,
            kind=version.kind,
            stage=version.stage,
            content_sha256=version.content_sha256,
            about=dict(version.about),
            created_at=now,
        )
    )
    files = [{**place, **vars(file)} for file in version.files]
    inputs = [{**place, **vars(each)} for each in sorted(set(version.inputs))]
    for table, rows in ((model_files, files), (model_inputs, inputs)):
        if rows:
            connection.execute(insert(table), rows)
    identity = VersionId(model, given)
    for stage, figures in version.metrics.items():
        record_metrics(connection, identity, stage, figures, now)
    events.record(connection, now, "model_registered", model=model, version=given, kind=version.kind)
    return identity


def next_number(connection: Connection, model: str) -> int:
    """The number that the next version of a model would get."""
    latest = connection.execute(select(models.c.latest).where(models.c.name == model)).scalar_one_or_none()
    return (latest or 0) + 1


def same_content(connection: Connection, model: str, content_sha256: str) -> VersionId | None:
    """The version of this model that has the very same files, if there is one."""
    v = model_versions.c
    found = connection.execute(
        select(v.number).where(v.model == model, v.content_sha256 == content_sha256)
    ).scalar_one_or_none()
    return None if found is None else VersionId(model, found)


def find_model(connection: Connection, name: str) -> ModelRow | None:
    """The model of this name."""
    row = connection.execute(select(models).where(models.c.name == name)).one_or_none()
    return None if row is None else _models(connection, [row])[0]


def list_models(connection: Connection, limit: int, after: str | None = None) -> list[ModelRow]:
    """At most `limit` models by name, those after `after`."""
    wanted = select(models).order_by(models.c.name).limit(limit)
    if after is not None:
        wanted = wanted.where(models.c.name > after)
    return _models(connection, connection.execute(wanted).all())


def find(connection: Connection, identity: VersionId) -> VersionRow | None:
    """The version with this number."""
    v = model_versions.c
    row = connection.execute(
        select(model_versions).where(v.model == identity.model, v.number == identity.number)
    ).one_or_none()
    return None if row is None else _versions(connection, [row])[0]


def list_versions(
    connection: Connection, model: str, limit: int, before: int | None = None
) -> list[VersionRow]:
    """At most `limit` versions of a model, the newest first; those with a smaller number than `before`."""
    v = model_versions.c
    wanted = select(model_versions).where(v.model == model).order_by(v.number.desc()).limit(limit)
    if before is not None:
        wanted = wanted.where(v.number < before)
    return _versions(connection, connection.execute(wanted).all())


def meaning(connection: Connection, model: str, alias: str) -> VersionId | None:
    """The version that an alias means now."""
    a = model_aliases.c
    found = connection.execute(
        select(a.number).where(a.model == model, a.alias == alias)
    ).scalar_one_or_none()
    return None if found is None else VersionId(model, found)


def move_alias(connection: Connection, identity: VersionId, alias: str, now: datetime) -> AliasMove:
    """Lets an alias mean this version, which must be there; what it meant before goes into its history."""
    before = meaning(connection, identity.model, alias)
    move = AliasMove(alias, before.number if before else None, identity.number, now)
    if before == identity:
        return move
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
    _remember(connection, identity.model, move)
    return move


def drop_alias(connection: Connection, model: str, alias: str, now: datetime) -> AliasMove | None:
    """Takes an alias away; None where there was none."""
    before = meaning(connection, model, alias)
    if before is None:
        return None
    a = model_aliases.c
    connection.execute(delete(model_aliases).where(a.model == model, a.alias == alias))
    move = AliasMove(alias, before.number, None, now)
    _remember(connection, model, move)
    return move


def alias_moves(connection: Connection, model: str, limit: int, alias: str | None = None) -> list[AliasMove]:
    """At most `limit` changes of a model's aliases, or of one of them, the latest first."""
    m = model_alias_moves.c
    wanted = select(m.alias, m.before, m.number, m.moved_at).where(m.model == model)
    if alias is not None:
        wanted = wanted.where(m.alias == alias)
    return [AliasMove(*row) for row in connection.execute(wanted.order_by(m.id.desc()).limit(limit))]


def record_metrics(
    connection: Connection, identity: VersionId, stage: str, figures: Mapping[str, float], now: datetime
) -> None:
    """Writes down what a version came to in a stage; figures of that stage that were there before are replaced."""
    m = model_metrics.c
    connection.execute(
        delete(model_metrics).where(m.model == identity.model, m.number == identity.number, m.stage == stage)
    )
    connection.execute(
        insert(model_metrics).values(
            model=identity.model, number=identity.number, stage=stage, figures=dict(figures), recorded_at=now
        )
    )


def holders(connection: Connection, digests: Collection[str]) -> dict[str, list[VersionId]]:
    """Hash -> the versions that have a file with it, in order. Hashes without one are left out."""
    f = model_files.c
    found: dict[str, list[VersionId]] = {}
    query = select(f.sha256, f.model, f.number).where(f.sha256.in_(list(digests))).distinct()
    for digest, model, number in connection.execute(query.order_by(f.model, f.number)):
        found.setdefault(digest, []).append(VersionId(model, number))
    return found


def made_from(connection: Connection, refs: Collection[str]) -> dict[str, list[tuple[VersionId, Relation]]]:
    """Ref -> the versions that have it among their inputs, and as what."""
    i = model_inputs.c
    found: dict[str, list[tuple[VersionId, Relation]]] = {}
    query = select(i.ref, i.model, i.number, i.relation).where(i.ref.in_(list(refs)))
    for ref, model, number, relation in connection.execute(query.order_by(i.model, i.number)):
        found.setdefault(ref, []).append((VersionId(model, number), relation))
    return found


def blobs_in_use(connection: Connection) -> set[str]:
    """Every blob that a version is made of."""
    return set(connection.execute(select(model_files.c.sha256).distinct()).scalars())


def _remember(connection: Connection, model: str, move: AliasMove) -> None:
    connection.execute(insert(model_alias_moves).values(model=model, **vars(move)))
    events.record(
        connection,
        move.moved_at,
        "model_alias_moved",
        model=model,
        alias=move.alias,
        version=move.number,
        before=move.before,
    )


def _models(connection: Connection, rows: Iterable[Any]) -> list[ModelRow]:
    named = {row.name: row for row in rows}
    a = model_aliases.c
    aliases: dict[str, dict[str, int]] = {}
    query = select(a.model, a.alias, a.number).where(a.model.in_(list(named))).order_by(a.alias)
    for model, alias, number in connection.execute(query):
        aliases.setdefault(model, {})[alias] = number
    return [
        ModelRow(row.name, row.latest, row.created_at, aliases.get(row.name, {})) for row in named.values()
    ]


def _versions(connection: Connection, rows: Sequence[Any]) -> list[VersionRow]:
    """The versions of these rows, all of one model, with what belongs to them."""
    if not rows:
        return []
    model, numbers = rows[0].model, [row.number for row in rows]

    def of(table: Table, order: str, *columns: str) -> dict[int, list[Any]]:
        wanted = select(*(table.c[column] for column in ("number", *columns)))
        found: dict[int, list[Any]] = {}
        for number, *values in connection.execute(
            wanted.where(table.c.model == model, table.c.number.in_(numbers)).order_by(table.c[order])
        ):
            found.setdefault(number, []).append(values)
        return found

    files = of(model_files, "path", "path", "sha256", "size_bytes")
    inputs = of(model_inputs, "relation", "relation", "ref")
    metrics = of(model_metrics, "stage", "stage", "figures")
    aliases = of(model_aliases, "alias", "alias")
    return [
        VersionRow(
            VersionId(model, row.number),
            row.kind,
            row.stage,
            row.content_sha256,
            row.about,
            row.created_at,
            tuple(FileRow(*values) for values in files.get(row.number, ())),
            tuple(sorted(Input(*values) for values in inputs.get(row.number, ()))),
            dict(metrics.get(row.number, ())),
            tuple(alias for (alias,) in aliases.get(row.number, ())),
        )
        for row in rows
    ]
