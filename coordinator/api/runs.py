"""Operator API: runs. Start one from an experiment file, follow it, fetch its results, cancel it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row

from coordinator.api.deps import RequestBody, ServicesDep
from coordinator.context.services import Services
from coordinator.db import events
from coordinator.db import runs as rows
from coordinator.db.project_filter import NOBODY
from coordinator.errors import Refusal
from coordinator.registry.registration import DeclaredFile
from coordinator.reports import run_report
from coordinator.toml_files import parse_toml

router = APIRouter(tags=["runs"])


class OwnModelFiles(RequestBody):
    """The files of a user's own model: `.tflite`, its manifest, and the params to start from, in safetensors."""

    artifact: DeclaredFile
    manifest: DeclaredFile
    params: DeclaredFile


class RunRequest(BaseModel):
    """An experiment, as the text of its TOML file or as the same document in JSON, and `--set` overrides.

    `own_model`: if `model.name` is the user's own code or file, it may come as content, uploaded to `/model-files`; then the
    coordinator needs neither.
    """

    experiment: str | dict[str, Any]
    sets: list[str] = Field([], max_length=1000)
    own_model: OwnModelFiles | None = None


class Run(BaseModel):
    """A run. `round`: the last committed one, whose model has `test_accuracy`; None if it was not scored.
    `r2`: of the model, if it predicts quantities; None before that is known.
    `notices`: settings of the experiment that do not apply here.
    """

    id: str
    name: str
    state: Literal["queued", "running", "finished", "failed", "cancelled"]
    round: int
    rounds: int
    test_accuracy: float | None
    r2: float | None
    created_at: datetime
    finished_at: datetime | None
    error: str | None
    notices: list[str]
    experiment: dict[str, Any]


class RunEvents(BaseModel):
    """A page of a run's events."""

    events: list[dict[str, Any]]
    next: int | None = Field(
        description="`after` for the next page, `before` where the newest come first; null on the last one."
    )


class RunService(Protocol):
    """What these routes use of `coordinator.runs.service.RunService`."""

    def create(
        self,
        document: Mapping[str, Any],
        sets: Sequence[str] = (),
        own_files: Mapping[str, DeclaredFile] | None = None,
        *,
        project: str,
    ) -> str: ...

    def cancel(self, run: str) -> None: ...

    def resume(self, run: str) -> None: ...


def runs_of(request: Request) -> RunService:
    """The run service of the process that serves this request."""
    service: RunService = request.app.state.runs
    return service


RunsDep = Annotated[RunService, Depends(runs_of)]


@router.post("/runs", status_code=201)
def create_run(request: RunRequest, service: RunsDep, services: ServicesDep) -> Run:
    """Starts federated training on the fleet.

    422 `code_not_allowed`, `path_not_allowed`: the experiment names code or a file that this coordinator does not accept
    from the API; the message says what its administrator can do. 409 `missing_files` lists under `missing` which files of
    `own_model` to upload first; 422 `own_model_unfit`: the experiment cannot have one.
    """
    document = request.experiment
    if isinstance(document, str):
        document = parse_toml(document, "experiment")
    own = request.own_model
    files = None if own is None else {name: getattr(own, name) for name in OwnModelFiles.model_fields}
    return _show(services, service.create(document, request.sets, files, project=services.project or NOBODY))


@router.get("/runs")
def list_runs(
    services: ServicesDep,
    state: str | None = None,
    called: Annotated[
        str | None, Query(pattern="^[^\\x00]*$", description="A name, or the beginning of an id.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[Run]:
    """Runs, newest first."""

    def read(connection: Connection) -> list[Run]:
        page = rows.newest(connection, limit, state, called)
        scores = rows.scores(connection, [row.id for row in page])
        return [_render(row, scores.get(row.id, {})) for row in page]

    return services.database.read(read)


@router.get("/runs/{run}")
def get_run(run: str, services: ServicesDep) -> Run:
    """One run."""
    return _show(services, run)


@router.get("/runs/{run}/rounds")
def list_rounds(run: str, services: ServicesDep) -> list[dict[str, Any]]:
    """The committed rounds, each a line of the report."""
    _read(services, run)
    return services.database.read(partial(rows.records, run=run))


@router.get("/runs/{run}/report")
def get_report(run: str, services: ServicesDep) -> dict[str, Any]:
    """The run's report so far, in the format of a simulation's `report.json`, and the `versions` registered from it."""

    def read(connection: Connection) -> dict[str, Any]:
        return {
            **run_report.make_report(connection, rows.require(connection, run)),
            "versions": run_report.find_versions(connection, run),
        }

    return services.database.read(read)


@router.get("/runs/{run}/events")
def list_events(
    run: str,
    services: ServicesDep,
    after: Annotated[int, Query(ge=0, lt=2**63, description="Only events after this one.")] = 0,
    before: Annotated[int | None, Query(ge=0, lt=2**63, description="Only events before this one.")] = None,
    order: Annotated[Literal["oldest", "newest"], Query(description="Which come first.")] = "oldest",
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> RunEvents:
    """The events of a run so far, a page at a time; `/events` streams them as they happen."""

    def read(connection: Connection) -> RunEvents:
        rows.require(connection, run)
        found = events.since(connection, after, limit + 1, run, before=before, newest_first=order == "newest")
        page = [events.as_json(row) for row in found[:limit]]
        return RunEvents(events=page, next=page[-1]["id"] if len(found) > limit else None)

    return services.database.read(read)


@router.get("/runs/{run}/model", response_class=FileResponse)
def get_model(run: str, services: ServicesDep) -> FileResponse:
    """The params of the last committed round, as a safetensors file."""
    row = _read(services, run)
    if row.params is None:
        raise Refusal(409, "not_prepared", f"run {run} has no model yet")
    return FileResponse(
        services.blobs.require(row.params),
        media_type="application/octet-stream",
        filename="model.safetensors",
    )


@router.post("/runs/{run}/cancel")
def cancel_run(run: str, service: RunsDep, services: ServicesDep) -> Run:
    """Ends a run now; committed rounds stay."""
    _read(services, run)  # it is of this project
    service.cancel(run)
    return _show(services, run)


@router.post("/runs/{run}/resume")
def resume_run(run: str, service: RunsDep, services: ServicesDep) -> Run:
    """Continues a failed or cancelled run behind its last committed round; its open round is drawn anew.

    409 `not_resumable`: the run is in another state.
    """
    _read(services, run)  # it is of this project
    service.resume(run)
    return _show(services, run)


def _read(services: Services, run: str) -> Row[Any]:
    return services.database.read(partial(rows.require, run=run))


def _show(services: Services, run: str) -> Run:
    def read(connection: Connection) -> Run:
        row = rows.require(connection, run)
        return _render(row, rows.scores(connection, [run]).get(run, {}))

    return services.database.read(read)


def _render(row: Row[Any], scores: Mapping[str, float | None]) -> Run:
    measured = {key: scores.get(key) for key in ("test_accuracy", "r2")}
    derived: dict[str, Any] = {"rounds": row.experiment["federation"]["rounds"], **measured}
    columns = (key for key in Run.model_fields if key not in derived)
    return Run(**derived, **{key: getattr(row, key) for key in columns})
