"""Operator API: the model registry. Models, their versions and files, what aliases mean, what came from what.

A version is written `name:number` or `name@alias`; a name alone means its newest version.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field, StringConstraints
from sqlalchemy import Connection

from coordinator.api.deps import Serving
from coordinator.db import registry
from coordinator.db.registry import ModelRow, VersionId, VersionRow
from coordinator.errors import Refusal
from coordinator.registry import lineage, register
from coordinator.registry.kinds import KINDS, Kind
from coordinator.registry.references import alias_name, digest, model_name, reference
from coordinator.registry.register import Sent
from coordinator.services import Services

router = APIRouter(tags=["models"])

_Text = Annotated[str, StringConstraints(max_length=300)]
_NAMED = "^[a-z0-9-]{0,63}$"


class Model(BaseModel):
    """A model: a name, and versions 1 to `latest`."""

    name: str
    latest: int
    created_at: datetime
    aliases: dict[str, int] = Field(description="What each alias means now.")


class Models(BaseModel):
    """A page of models, by name."""

    models: list[Model]
    next: str | None = Field(description="`after` for the next page; null on the last one.")


class VersionFile(BaseModel):
    path: str
    sha256: str
    size_bytes: int


class VersionInput(BaseModel):
    """What a version was made from: data by fingerprint, a parent's file by hash, a federated run by id."""

    relation: str
    ref: str


class Version(BaseModel):
    """A version of a model. It never changes; aliases and metrics are said of it."""

    version: str = Field(description="`name:number`")
    model: str
    number: int
    kind: str = Field(description=" | ".join(KINDS))
    stage: str
    created_at: datetime
    aliases: list[str]
    files: list[VersionFile]
    inputs: list[VersionInput]
    metrics: dict[str, dict[str, float]] = Field(description="By stage.")
    about: dict[str, Any]


class Versions(BaseModel):
    """A page of versions, the newest first."""

    versions: list[Version]
    next: int | None = Field(description="`before` for the next page; null on the last one.")


class VersionFileRequest(BaseModel):
    model_config = {"extra": "forbid"}

    sha256: str = Field(max_length=64)
    size_bytes: int = Field(ge=1, lt=2**63)


class VersionRequest(BaseModel):
    """Files of a new version, by path; or a finished run, whose files are here."""

    model_config = {"extra": "forbid"}

    kind: Kind = "params"
    files: dict[_Text, VersionFileRequest] = Field({}, max_length=1000)
    parents: list[_Text] = Field(
        [], max_length=16, description="Versions it was made from, where no document of it says so."
    )
    run: str | None = Field(None, max_length=36, description="In place of everything else.")
    renumber: bool = Field(False, description="Write the number it gets into the manifest of a release.")


class AliasRequest(BaseModel):
    """`expected`: refuse where the alias means another number by now; 0: where it means any."""

    model_config = {"extra": "forbid"}

    version: int = Field(ge=1, lt=2**31)
    expected: int | None = Field(None, ge=0, lt=2**31)


class AliasMove(BaseModel):
    """One change; null where there was none before, or it was taken away."""

    alias: str
    before: int | None
    number: int | None
    moved_at: datetime


class MetricsRequest(BaseModel):
    model_config = {"extra": "forbid"}

    figures: dict[_Text, Annotated[float, Field(allow_inf_nan=False)]] = Field(max_length=200)


class FileProgress(BaseModel):
    """Bytes of an upload that are here."""

    offset: int


class LineageNode(BaseModel):
    id: str
    kind: str = Field(description="version | data | run | params")
    facts: dict[str, Any]


class LineageEdge(BaseModel):
    parent: str
    child: str
    relation: str = Field(description="data | params | run | start")


class Lineage(BaseModel):
    """All that a version came from and all that came of it. `cut`: there is more."""

    of: str
    nodes: list[LineageNode]
    edges: list[LineageEdge]
    cut: bool


@router.get("/models")
def list_models(
    services: Serving,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(pattern=_NAMED, description="Only names after this one.")] = None,
) -> Models:
    """Models by name, a page at a time."""
    found = services.database.read(partial(registry.list_models, limit=limit + 1, after=after))
    page = found[:limit]
    return Models(models=[_model(row) for row in page], next=page[-1].name if len(found) > limit else None)


@router.get("/models/{name}")
def get_registered_model(name: str, services: Serving) -> Model:
    """One model."""
    return _model(services.database.read(partial(_known, name=model_name(name))))


@router.get("/models/{name}/versions")
def list_versions(
    name: str,
    services: Serving,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1, lt=2**31, description="Only smaller numbers.")] = None,
) -> Versions:
    """Versions of a model, the newest first, a page at a time."""
    model_name(name)

    def read(connection: Connection) -> list[VersionRow]:
        _known(connection, name)
        return registry.list_versions(connection, name, limit + 1, before)

    found = services.database.read(read)
    page = found[:limit]
    return Versions(
        versions=[_version(row) for row in page],
        next=page[-1].id.number if len(found) > limit else None,
    )


@router.post("/models/{name}/versions", status_code=201)
def register_version(name: str, asked: VersionRequest, services: Serving, response: Response) -> Version:
    """Registers files as the next version; 200 and that version where the very same files are one already.

    409 `missing_files` lists under `missing` what to upload first.
    """
    if asked.run is not None:
        row, is_new = register.register_run(services, name, asked.run)
    else:
        sent = {path: Sent(file.sha256, file.size_bytes) for path, file in asked.files.items()}
        kind: Kind = asked.kind
        row, is_new = register.register(services, name, kind, sent, asked.parents, renumber=asked.renumber)
    response.status_code = 201 if is_new else 200
    return _version(row)


@router.get("/model-files/{sha256}")
def get_model_upload(sha256: str, services: Serving) -> FileProgress:
    """How far an upload is."""
    return FileProgress(offset=services.incoming_models.offset(digest(sha256)))


@router.put("/model-files/{sha256}")
async def upload_model_file(
    sha256: str, request: Request, services: Serving, offset: Annotated[int, Query(ge=0)]
) -> FileProgress:
    """The next piece of a file, as the raw body. The file is judged when it is registered."""
    piece = await request.body()
    write = services.incoming_models.write
    return FileProgress(offset=await run_in_threadpool(write, digest(sha256), offset, piece))


@router.put("/models/{name}/aliases/{alias}")
def move_alias(name: str, alias: str, asked: AliasRequest, services: Serving) -> AliasMove:
    """Lets an alias mean a version, from one moment to the next."""
    model_name(name)
    alias_name(alias)

    def work(connection: Connection) -> registry.AliasMove:
        model = _known(connection, name)
        now = model.aliases.get(alias, 0)
        if asked.expected is not None and asked.expected != now:
            means = f"{name}:{now}" if now else "no version"
            raise Refusal(409, "alias_moved", f"{name}@{alias} means {means} by now", number=now or None)
        identity = VersionId(name, asked.version)
        if registry.find(connection, identity) is None:
            raise Refusal(404, "unknown_version", f"there is no {identity}; the newest is {model.latest}")
        return registry.move_alias(connection, identity, alias, services.clock())

    return _moved(services, work)


@router.delete("/models/{name}/aliases/{alias}")
def drop_alias(name: str, alias: str, services: Serving) -> AliasMove:
    """Takes an alias away; its history stays."""
    model_name(name)
    alias_name(alias)

    def work(connection: Connection) -> registry.AliasMove:
        _known(connection, name)
        move = registry.drop_alias(connection, name, alias, services.clock())
        if move is None:
            raise Refusal(404, "unknown_alias", f"{name} has no alias {alias}")
        return move

    return _moved(services, work)


@router.get("/models/{name}/moves")
def list_alias_moves(
    name: str,
    services: Serving,
    alias: Annotated[str | None, Query(pattern=_NAMED, description="Only of this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[AliasMove]:
    """What aliases meant and when that changed, the latest first."""
    model_name(name)

    def read(connection: Connection) -> list[registry.AliasMove]:
        _known(connection, name)
        return registry.alias_moves(connection, name, limit, alias)

    return [AliasMove(**vars(move)) for move in services.database.read(read)]


@router.get("/versions/{version}")
def get_version(version: str, services: Serving) -> Version:
    """One version."""
    return _version(_found(services, version))


@router.get("/versions/{version}/files/{path:path}", response_class=FileResponse)
def get_version_file(version: str, path: str, services: Serving) -> FileResponse:
    """A file of a version, whole or by ranges. The hash is the ETag."""
    row = _found(services, version)
    file = next((file for file in row.files if file.path == path), None)
    if file is None:
        known = ", ".join(each.path for each in row.files)[:300]
        raise Refusal(404, "unknown_file", f"{row.id} has no file {path[:100]!r}; its files: {known}")
    return FileResponse(
        services.blobs.path(file.sha256),
        media_type="application/octet-stream",
        filename=path.rpartition("/")[2],
        headers={"etag": f'"{file.sha256}"'},
    )


@router.put("/versions/{version}/metrics/{stage}")
def record_metrics(version: str, stage: str, asked: MetricsRequest, services: Serving) -> Version:
    """Says what a version came to in a stage, such as an evaluation elsewhere; replaces what was said of it before."""
    which = reference(version)
    alias_name(stage)

    def work(connection: Connection) -> VersionRow:
        row = register.found(connection, which)
        registry.record_metrics(connection, row.id, stage, asked.figures, services.clock())
        return register.found(connection, which)

    return _version(services.database.write(work).result())


@router.get("/versions/{version}/lineage")
def get_lineage(version: str, services: Serving) -> Lineage:
    """What a version came from and what came of it."""
    which = reference(version)

    def read(connection: Connection) -> lineage.Graph:
        return lineage.lineage(connection, register.found(connection, which).id)

    graph = services.database.read(read)
    return Lineage(
        of=graph.of.id,
        nodes=[LineageNode(id=n.id, kind=n.kind, facts=facts) for n, facts in sorted(graph.nodes.items())],
        edges=[
            LineageEdge(parent=edge.parent.id, child=edge.child.id, relation=edge.relation)
            for edge in sorted(graph.edges)
        ],
        cut=graph.cut,
    )


def _known(connection: Connection, name: str) -> ModelRow:
    model = registry.find_model(connection, name)
    if model is None:
        raise Refusal(404, "unknown_model", f"there is no model {name}")
    return model


def _found(services: Services, version: str) -> VersionRow:
    return services.database.read(partial(register.found, which=reference(version)))


def _moved(services: Services, work: Any) -> AliasMove:
    move: registry.AliasMove = services.database.write(work).result()
    services.signals.notify("events")
    return AliasMove(**vars(move))


def _model(row: ModelRow) -> Model:
    return Model(name=row.name, latest=row.latest, created_at=row.created_at, aliases=dict(row.aliases))


def _version(row: VersionRow) -> Version:
    return Version(
        version=str(row.id),
        model=row.id.model,
        number=row.id.number,
        kind=row.kind,
        stage=row.stage,
        created_at=row.created_at,
        aliases=list(row.aliases),
        files=[VersionFile(**vars(file)) for file in row.files],
        inputs=[VersionInput(relation=each.relation, ref=each.ref) for each in row.inputs],
        metrics={stage: dict(figures) for stage, figures in row.metrics.items()},
        about=dict(row.about),
    )
