"""Queries of models, their versions and aliases, such as `champion`. Each function is one step of a transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Table, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.db import events
from coordinator.db.project_filter import project_of, working_for
from coordinator.db.tables import (
    model_alias_moves,
    model_aliases,
    model_files,
    model_inputs,
    model_metrics,
    model_versions,
    models,
)
from coordinator.errors import Refusal

Relation = Literal["data", "params", "run"]
"""Kind of an input: a data set by its fingerprint, a file of params by its hash, a federated run by its id."""


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
    """An input of a version. `ref` is a fingerprint, a hash or an id, depending on `relation`."""

    relation: Relation
    ref: str


@dataclass(frozen=True)
class NewVersion:
    """A version before it has a number. `metrics`: stage -> name -> number."""

    kind: str
    stage: str
    content_sha256: str
    about: Mapping[str, Any]
    files: Sequence[FileRow]
    inputs: Sequence[Input]
    metrics: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class VersionRow(NewVersion):
    """A registered version with everything that belongs to it. `aliases`: those that refer to it now."""

    id: VersionId
    created_at: datetime
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class ModelRow:
    """A model: a name, versions 1 to `latest`, and for each alias the number that it refers to now."""

    name: str
    latest: int
    created_at: datetime
    aliases: Mapping[str, int]


def add(
    connection: Connection, model: str, version: NewVersion, now: datetime, number: int | None = None
) -> VersionId | None:
    """Adds a version under the next number of its model, which is created if needed.

    `number`: the one it must get; returns None and writes nothing if another one is next.

    Raises:
        Refusal: 409 `name_taken`: another project has a model of this name.
    """
    row = {"name": model, "latest": 0, "created_at": now}
    _require_free(connection, model)
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(models).values(row).on_conflict_do_nothing())
    # Taking the number locks the model's row, so the second of two writers waits and takes the next one.
    increment = update(models).where(models.c.name == model)
    if number is not None:
        increment = increment.where(models.c.latest == number - 1)
    latest = connection.execute(increment.values(latest=models.c.latest + 1).returning(models.c.latest))
    assigned = latest.scalar_one_or_none()
    if assigned is None:
        return None
    key = {"model": model, "number": assigned}
    connection.execute(
        insert(model_versions).values(
            **key,
            kind=version.kind,
            stage=version.stage,
            content_sha256=version.content_sha256,
            about=dict(version.about),
            created_at=now,
        )
    )
    files = [{**key, **vars(file)} for file in version.files]
    inputs = [{**key, **vars(each)} for each in sorted(set(version.inputs))]
    for table, rows in ((model_files, files), (model_inputs, inputs)):
        if rows:
            connection.execute(insert(table), rows)
    identity = VersionId(model, assigned)
    for stage, figures in version.metrics.items():
        record_metrics(connection, identity, stage, figures, now)
    events.record(connection, now, "model_registered", model=model, version=assigned, kind=version.kind)
    return identity


def owners(connection: Connection) -> dict[str, str]:
    """Model -> its project, of the whole coordinator. Devices know models by name, so a name is in one project only."""
    with working_for(connection, None):
        return {row.name: row.project for row in connection.execute(select(models.c.name, models.c.project))}


def _require_free(connection: Connection, model: str) -> None:
    """Requires that no other project than the connection's has a model of this name."""
    project = project_of(connection)
    with working_for(connection, None):
        query = select(models.c.project).where(models.c.name == model)
        owner = connection.execute(query).scalar_one_or_none()
    if project is not None and owner not in (None, project):
        raise name_taken(model)


def name_taken(model: str) -> Refusal:
    return Refusal(
        409, "name_taken", f"another project of this coordinator has a model {model}; choose another name"
    )


def next_number(connection: Connection, model: str) -> int:
    """The number of a model's next version."""
    latest = connection.execute(select(models.c.latest).where(models.c.name == model)).scalar_one_or_none()
    return (latest or 0) + 1


def same_content(connection: Connection, model: str, content_sha256: str) -> VersionId | None:
    """The version of this model with identical files, if there is one."""
    v = model_versions.c
    number = connection.execute(
        select(v.number).where(v.model == model, v.content_sha256 == content_sha256)
    ).scalar_one_or_none()
    return None if number is None else VersionId(model, number)


def find_model(connection: Connection, name: str) -> ModelRow | None:
    """The model of this name."""
    row = connection.execute(select(models).where(models.c.name == name)).one_or_none()
    return None if row is None else _models(connection, [row])[0]


def list_models(connection: Connection, limit: int, after: str | None = None) -> list[ModelRow]:
    """At most `limit` models by name, after the name `after`."""
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
    """At most `limit` versions of a model, newest first; only numbers below `before`, if given."""
    v = model_versions.c
    wanted = select(model_versions).where(v.model == model).order_by(v.number.desc()).limit(limit)
    if before is not None:
        wanted = wanted.where(v.number < before)
    return _versions(connection, connection.execute(wanted).all())


def record_metrics(
    connection: Connection, identity: VersionId, stage: str, figures: Mapping[str, float], now: datetime
) -> None:
    """Stores the figures of a version in a stage, replacing earlier ones of that stage."""
    m = model_metrics.c
    connection.execute(
        delete(model_metrics).where(m.model == identity.model, m.number == identity.number, m.stage == stage)
    )
    connection.execute(
        insert(model_metrics).values(
            model=identity.model, number=identity.number, stage=stage, figures=dict(figures), recorded_at=now
        )
    )


def versions_with_file(connection: Connection, digests: Collection[str]) -> dict[str, list[VersionId]]:
    """Hash -> the versions that contain a file with it, in order. Hashes without one are left out."""
    f = model_files.c
    versions: dict[str, list[VersionId]] = {}
    query = select(f.sha256, f.model, f.number).where(f.sha256.in_(list(digests))).distinct()
    for digest, model, number in connection.execute(query.order_by(f.model, f.number)):
        versions.setdefault(digest, []).append(VersionId(model, number))
    return versions


def versions_with_input(
    connection: Connection, refs: Collection[str]
) -> dict[str, list[tuple[VersionId, Relation]]]:
    """Ref -> the versions that have it as an input, with the relation."""
    i = model_inputs.c
    versions: dict[str, list[tuple[VersionId, Relation]]] = {}
    query = select(i.ref, i.model, i.number, i.relation).where(i.ref.in_(list(refs)))
    for ref, model, number, relation in connection.execute(query.order_by(i.model, i.number)):
        versions.setdefault(ref, []).append((VersionId(model, number), relation))
    return versions


def blobs_in_use(connection: Connection) -> set[str]:
    """Every blob that is a file of a version."""
    return set(connection.execute(select(model_files.c.sha256).distinct()).scalars())


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
    """The versions of these rows, all of one model, with everything that belongs to them."""
    if not rows:
        return []
    model, numbers = rows[0].model, [row.number for row in rows]

    def of(table: Table, order: str, *columns: str) -> dict[int, list[Any]]:
        query = select(*(table.c[column] for column in ("number", *columns)))
        rows_by_number: dict[int, list[Any]] = {}
        for number, *values in connection.execute(
            query.where(table.c.model == model, table.c.number.in_(numbers)).order_by(table.c[order])
        ):
            rows_by_number.setdefault(number, []).append(values)
        return rows_by_number

    files = of(model_files, "path", "path", "sha256", "size_bytes")
    inputs = of(model_inputs, "relation", "relation", "ref")
    metrics = of(model_metrics, "stage", "stage", "figures")
    aliases = of(model_aliases, "alias", "alias")
    return [
        VersionRow(
            row.kind,
            row.stage,
            row.content_sha256,
            row.about,
            tuple(FileRow(*values) for values in files.get(row.number, ())),
            tuple(sorted(Input(*values) for values in inputs.get(row.number, ()))),
            dict(metrics.get(row.number, ())),
            VersionId(model, row.number),
            row.created_at,
            tuple(alias for (alias,) in aliases.get(row.number, ())),
        )
        for row in rows
    ]


@dataclass(frozen=True)
class AliasMove:
    """One change of an alias. `before` is None for a new alias, `number` for a removed one."""

    alias: str
    before: int | None
    number: int | None
    moved_at: datetime


def resolve_alias(connection: Connection, model: str, alias: str) -> VersionId | None:
    """The version that an alias refers to now."""
    a = model_aliases.c
    number = connection.execute(
        select(a.number).where(a.model == model, a.alias == alias)
    ).scalar_one_or_none()
    return None if number is None else VersionId(model, number)


def move_alias(connection: Connection, identity: VersionId, alias: str, now: datetime) -> AliasMove:
    """Points an alias to this version, which must exist, and records the change in its history."""
    before = resolve_alias(connection, identity.model, alias)
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


def remove_alias(connection: Connection, model: str, alias: str, now: datetime) -> AliasMove | None:
    """Removes an alias; None if there was none."""
    before = resolve_alias(connection, model, alias)
    if before is None:
        return None
    a = model_aliases.c
    connection.execute(delete(model_aliases).where(a.model == model, a.alias == alias))
    change = AliasMove(alias, before.number, None, now)
    _record_move(connection, model, change)
    return change


def alias_moves(connection: Connection, model: str, limit: int, alias: str | None = None) -> list[AliasMove]:
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
