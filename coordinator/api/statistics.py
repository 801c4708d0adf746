"""Operator API: federated statistics. Ask the devices that hold a data set, and fetch the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row

from coordinator.api.deps import ServicesDep
from coordinator.api.runs import RunRequest
from coordinator.db import runs as rows
from coordinator.db.project_filter import NOBODY
from coordinator.errors import Refusal
from coordinator.toml_files import parse_toml
from edge_client.wire.schema import DataSchema

router = APIRouter(tags=["statistics"])


class Statistics(BaseModel):
    """A statistics round. `report`: of the devices that answered so far."""

    id: str
    name: str
    state: Literal["queued", "running", "finished", "failed", "cancelled"]
    error: str | None
    report: dict[str, Any]


class ProposedSchema(BaseModel):
    """`schema`: the document of a data schema, for `data.schema` of an experiment. `notices`: what it leaves out, and why."""

    document: dict[str, Any] = Field(alias="schema")
    notices: list[str]


class StatisticsService(Protocol):
    """What these routes use of `coordinator.runs.service.RunService`."""

    def create_statistics(
        self, document: Mapping[str, Any], sets: Sequence[str] = (), *, project: str
    ) -> str: ...

    def statistics_report(self, connection: Connection, run: str) -> dict[str, Any]: ...

    def statistics_schema(self, connection: Connection, run: str) -> tuple[DataSchema, list[str]]: ...


def service_of(request: Request) -> StatisticsService:
    """The run service of the process that serves this request."""
    service: StatisticsService = request.app.state.runs
    return service


ServiceDep = Annotated[StatisticsService, Depends(service_of)]


@router.post("/statistics", status_code=201)
def create_statistics(request: RunRequest, service: ServiceDep, services: ServicesDep) -> Statistics:
    """Asks every device that has the experiment's `data.dataset` and matches its `[devices]`."""
    document = request.experiment
    if isinstance(document, str):
        document = parse_toml(document, "experiment")
    run = service.create_statistics(document, request.sets, project=services.project or NOBODY)
    return services.database.read(partial(_read, service=service, run=run))


@router.get("/statistics/{run}")
def get_statistics(run: str, service: ServiceDep, services: ServicesDep) -> Statistics:
    """A statistics round. Cancel it as a run."""
    return services.database.read(partial(_read, service=service, run=run))


@router.get("/statistics/{run}/schema")
def get_statistics_schema(run: str, service: ServiceDep, services: ServicesDep) -> ProposedSchema:
    """The data schema that the tables of the devices have in common. 422 `no_schema`: they contradict each other."""

    def read(connection: Connection) -> ProposedSchema:
        _require_statistics(connection, run)
        schema, notices = service.statistics_schema(connection, run)
        return ProposedSchema(schema=json.loads(schema.to_json()), notices=notices)

    return services.database.read(read)


def _read(connection: Connection, service: StatisticsService, run: str) -> Statistics:
    row = _require_statistics(connection, run)
    report = service.statistics_report(connection, run)
    return Statistics(id=row.id, name=row.name, state=row.state, error=row.error, report=report)


def _require_statistics(connection: Connection, run: str) -> Row[Any]:
    row = rows.require(connection, run)
    if row.kind != "statistics":
        raise Refusal(404, "unknown_run", f"run {run[:100]} is no statistics round")
    return row
