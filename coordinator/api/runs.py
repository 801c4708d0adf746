"""Runs: start one from an experiment file, look at it, fetch what it came to, cancel it."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row

from coordinator import experiment as experiments
from coordinator import run_report
from coordinator.api.deps import Serving
from coordinator.db import runs as rows
from coordinator.errors import Refusal
from coordinator.runs import RunService
from coordinator.services import Services

router = APIRouter(tags=["runs"])


class RunRequest(BaseModel):
    """An experiment, as the text of its TOML file or as the same document in JSON, and `--set` settings on top."""

    experiment: str | dict[str, Any]
    sets: list[str] = Field([], max_length=1000)


class Run(BaseModel):
    """A run. `round` is the last committed one. `notices`: what of the experiment does not apply here."""

    id: str
    name: str
    state: Literal["queued", "running", "finished", "failed", "cancelled"]
    round: int
    rounds: int
    created_at: datetime
    finished_at: datetime | None
    error: str | None
    notices: list[str]
    experiment: dict[str, Any]


def runs_of(request: Request) -> RunService:
    """The run service of the process that serves this request."""
    service: RunService = request.app.state.runs
    return service


@router.post("/runs", status_code=201)
def create_run(asked: RunRequest, service: Annotated[RunService, Depends(runs_of)], services: Serving) -> Run:
    """Starts a federated training on the fleet.

    422 `code_not_allowed`, `path_not_allowed`: the experiment names code or a file that this coordinator does not take
    from the API; the message says what its administrator can do.
    """
    given = asked.experiment
    document = experiments.parsed(given, "experiment") if isinstance(given, str) else given
    return _shown(_found(services, service.create(document, asked.sets)))


@router.get("/runs")
def list_runs(
    services: Serving,
    state: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[Run]:
    """Runs, the newest first."""
    return [_shown(row) for row in services.database.read(partial(rows.newest, limit=limit, state=state))]


@router.get("/runs/{run}")
def get_run(run: str, services: Serving) -> Run:
    """One run."""
    return _shown(_found(services, run))


@router.get("/runs/{run}/rounds")
def list_rounds(run: str, services: Serving) -> list[dict[str, Any]]:
    """The committed rounds, each a line of the report."""
    _found(services, run)
    return services.database.read(partial(rows.records, run=run))


@router.get("/runs/{run}/report")
def get_report(run: str, services: Serving) -> dict[str, Any]:
    """What the run has come to so far: the document that a simulation leaves as `report.json`, and `versions` of it."""

    def read(connection: Connection) -> dict[str, Any]:
        found = rows.find(connection, run)
        if found is None:
            raise _unknown(run)
        return {**run_report.document(connection, found), "versions": run_report.versions(connection, run)}

    return services.database.read(read)


@router.get("/runs/{run}/model", response_class=FileResponse)
def get_model(run: str, services: Serving) -> FileResponse:
    """The params as of the last committed round, a safetensors file."""
    found = _found(services, run)
    if found.params is None:
        raise Refusal(409, "not_prepared", f"run {run} has no model yet")
    return FileResponse(
        services.blobs.path(found.params), media_type="application/octet-stream", filename="model.safetensors"
    )


@router.post("/runs/{run}/cancel")
def cancel_run(run: str, service: Annotated[RunService, Depends(runs_of)], services: Serving) -> Run:
    """Ends a run now; committed rounds stay."""
    service.cancel(run)
    return _shown(_found(services, run))


def _found(services: Services, run: str) -> Row[Any]:
    found = services.database.read(partial(rows.find, run=run))
    if found is None:
        raise _unknown(run)
    return found


def _unknown(run: str) -> Refusal:
    return Refusal(404, "unknown_run", f"there is no run {run[:100]}")


def _shown(row: Row[Any]) -> Run:
    return Run(rounds=row.experiment["federation"]["rounds"], **{key: getattr(row, key) for key in _SAME})


_SAME = tuple(key for key in Run.model_fields if key != "rounds")
