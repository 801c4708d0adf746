"""Operator API: the model registry. Models, their versions and files, aliases, lineage.

A version is written `name:number` or `name@alias`; a name alone refers to its newest version.
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

from coordinator.api.deps import FileProgress, RequestBody, ServicesDep
from coordinator.context.services import Services
from coordinator.db import registry
from coordinator.db.registry import AliasMove, FileRow, Input, ModelRow, VersionId, VersionRow
from coordinator.errors import Refusal
from coordinator.model_references import check_alias, check_model_name, check_sha256, parse_reference
from coordinator.registry import lineage, registration
from coordinator.registry.deployed import add_rollouts
from coordinator.registry.kinds import KINDS, Kind
from coordinator.registry.registration import DeclaredFile

router = APIRouter(tags=["models"])

_Text = Annotated[str, StringConstraints(max_length=300)]
_NAMED = "^[a-z0-9-]{0,63}$"


class Models(BaseModel):
    """A page of models, by name."""

    models: list[ModelRow]
    next: str | None = Field(description="`after` for the next page; null on the last one.")


class Version(BaseModel):
    """A version of a model. It never changes, except for its aliases and metrics."""

    version: str = Field(description="`name:number`")
    model: str
    number: int
    kind: str = Field(description=" | ".join(KINDS))
    stage: str
    created_at: datetime
    aliases: list[str]
    files: tuple[FileRow, ...]
    inputs: tuple[Input, ...] = Field(
        description="Data by fingerprint, a parent's file by hash, a federated run by id."
    )
    metrics: dict[str, dict[str, float]] = Field(description="By stage.")
    about: dict[str, Any]


class Versions(BaseModel):
    """A page of versions, newest first."""

    versions: list[Version]
    next: int | None = Field(description="`before` for the next page; null on the last one.")


class VersionRequest(RequestBody):
    """The files of a new version, by path; or a finished run, whose files the coordinator has."""

    kind: Kind = "params"
    files: dict[_Text, DeclaredFile] = Field({}, max_length=1000)
    parents: list[_Text] = Field(
        [], max_length=16, description="Versions it was made from, if none of its documents names them."
    )
    run: str | None = Field(None, max_length=36, description="In place of everything else.")
    renumber: bool = Field(False, description="Write the assigned number into the manifest of a release.")


class AliasRequest(RequestBody):
    """`expected`: refuse if the alias now refers to another number; 0: if it refers to any."""

    version: int = Field(ge=1, lt=2**31)
    expected: int | None = Field(None, ge=0, lt=2**31)


class MetricsRequest(RequestBody):
    figures: dict[_Text, Annotated[float, Field(allow_inf_nan=False)]] = Field(max_length=200)


class LineageNode(BaseModel):
    id: str
    kind: str = Field(description="version | data | run | params | rollout | devices")
    facts: dict[str, Any]


class LineageEdge(BaseModel):
    parent: str
    child: str
    relation: str = Field(description="data | params | run | start | rollout | devices")


class Lineage(BaseModel):
    """The ancestors and descendants of a version, to the rollouts and the devices. `cut`: there are more."""

    of: str
    nodes: list[LineageNode]
    edges: list[LineageEdge]
    cut: bool


@router.get("/models")
def list_models(
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(pattern=_NAMED, description="Only names after this one.")] = None,
) -> Models:
    """Models by name, a page at a time."""
    rows = services.database.read(partial(registry.list_models, limit=limit + 1, after=after))
    page = rows[:limit]
    return Models(models=page, next=page[-1].name if len(rows) > limit else None)


@router.get("/models/{name}")
def get_registered_model(name: str, services: ServicesDep) -> ModelRow:
    """One model."""
    return services.database.read(partial(registration.require_model, name=check_model_name(name)))


@router.get("/models/{name}/versions")
def list_versions(
    name: str,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1, lt=2**31, description="Only smaller numbers.")] = None,
) -> Versions:
    """Versions of a model, newest first, a page at a time."""
    check_model_name(name)

    def read(connection: Connection) -> list[VersionRow]:
        registration.require_model(connection, name)
        return registry.list_versions(connection, name, limit + 1, before)

    rows = services.database.read(read)
    page = rows[:limit]
    return Versions(
        versions=[_render(row) for row in page], next=page[-1].id.number if len(rows) > limit else None
    )


@router.post("/models/{name}/versions", status_code=201)
def register_version(
    name: str, request: VersionRequest, services: ServicesDep, response: Response
) -> Version:
    """Registers files as the next version; 200 and the existing version if it has the same files.

    409 `missing_files` lists under `missing` what to upload first.
    """
    if request.run is not None:
        row, is_new = registration.register_run(services, name, request.run)
    else:
        row, is_new = registration.register(
            services, name, request.kind, request.files, request.parents, renumber=request.renumber
        )
    response.status_code = 201 if is_new else 200
    return _render(row)


@router.get("/model-files/{sha256}")
def get_model_upload(sha256: str, services: ServicesDep) -> FileProgress:
    """The progress of an upload."""
    return FileProgress(offset=services.incoming_models.offset(check_sha256(sha256)))


@router.put("/model-files/{sha256}")
async def upload_model_file(
    sha256: str, request: Request, services: ServicesDep, offset: Annotated[int, Query(ge=0, le=2**53)]
) -> FileProgress:
    """The next piece of a file, as the raw body. Registering checks the file."""
    piece = await request.body()
    write = services.incoming_models.write
    return FileProgress(offset=await run_in_threadpool(write, check_sha256(sha256), offset, piece))


@router.put("/models/{name}/aliases/{alias}")
def move_alias(name: str, alias: str, request: AliasRequest, services: ServicesDep) -> AliasMove:
    """Points an alias to a version, atomically."""
    check_model_name(name)
    check_alias(alias)

    def work(connection: Connection) -> AliasMove:
        model = registration.require_model(connection, name)
        now = model.aliases.get(alias, 0)
        if request.expected is not None and request.expected != now:
            current = f"{name}:{now}" if now else "no version"
            raise Refusal(409, "alias_moved", f"{name}@{alias} now refers to {current}", number=now or None)
        identity = VersionId(name, request.version)
        if registry.find(connection, identity) is None:
            raise Refusal(404, "unknown_version", f"there is no {identity}; the newest is {model.latest}")
        return registry.move_alias(connection, identity, alias, services.clock())

    return services.commit(work)


@router.delete("/models/{name}/aliases/{alias}")
def drop_alias(name: str, alias: str, services: ServicesDep) -> AliasMove:
    """Removes an alias; its history stays."""
    check_model_name(name)
    check_alias(alias)

    def work(connection: Connection) -> AliasMove:
        registration.require_model(connection, name)
        move = registry.remove_alias(connection, name, alias, services.clock())
        if move is None:
            raise Refusal(404, "unknown_alias", f"{name} has no alias {alias}")
        return move

    return services.commit(work)


@router.get("/models/{name}/moves")
def list_alias_moves(
    name: str,
    services: ServicesDep,
    alias: Annotated[str | None, Query(pattern=_NAMED, description="Only of this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[AliasMove]:
    """The changes of a model's aliases, latest first."""
    check_model_name(name)

    def read(connection: Connection) -> list[AliasMove]:
        registration.require_model(connection, name)
        return registry.alias_moves(connection, name, limit, alias)

    return services.database.read(read)


@router.get("/versions/{version}")
def get_version(version: str, services: ServicesDep) -> Version:
    """One version."""
    return _render(_require_version(services, version))


@router.get("/versions/{version}/files/{path:path}", response_class=FileResponse)
def get_version_file(version: str, path: str, services: ServicesDep) -> FileResponse:
    """A file of a version, entire or by ranges. The hash is the ETag."""
    row = _require_version(services, version)
    file = next((file for file in row.files if file.path == path), None)
    if file is None:
        known = ", ".join(each.path for each in row.files)[:300]
        raise Refusal(404, "unknown_file", f"{row.id} has no file {path[:100]!r}; its files: {known}")
    return FileResponse(
        services.blobs.require(file.sha256),
        media_type="application/octet-stream",
        filename=path.rpartition("/")[2],
        headers={"etag": f'"{file.sha256}"'},
    )


@router.put("/versions/{version}/metrics/{stage}")
def record_metrics(version: str, stage: str, request: MetricsRequest, services: ServicesDep) -> Version:
    """Stores the metrics of a version in a stage, such as an evaluation elsewhere; replaces earlier ones."""
    which = parse_reference(version)
    check_alias(stage)

    def work(connection: Connection) -> VersionRow:
        row = registration.require_version(connection, which)
        registry.record_metrics(connection, row.id, stage, request.figures, services.clock())
        return registration.require_version(connection, which)

    return _render(services.commit(work))


@router.get("/versions/{version}/lineage")
def get_lineage(version: str, services: ServicesDep) -> Lineage:
    """The ancestors and descendants of a version, its rollouts and how many devices run it."""
    which = parse_reference(version)

    def read(connection: Connection) -> lineage.Graph:
        graph = lineage.lineage(connection, registration.require_version(connection, which).id)
        add_rollouts(connection, graph)
        return graph

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


def _require_version(services: Services, version: str) -> VersionRow:
    return services.database.read(partial(registration.require_version, which=parse_reference(version)))


def _render(row: VersionRow) -> Version:
    names = {"version": str(row.id), "model": row.id.model, "number": row.id.number}
    return Version.model_validate({**vars(row), **names}, from_attributes=True)
