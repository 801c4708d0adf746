"""The coordinator about itself: is it there, what is it doing, its metrics."""

from __future__ import annotations

from datetime import datetime
from importlib import metadata

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from sqlalchemy import Connection, Table, func, select

from coordinator.api.deps import Serving, admin
from coordinator.db import tables
from coordinator.services import Services

router = APIRouter(tags=["system"])
open_router = APIRouter(tags=["system"])

_LOOPBACK = ("127.0.0.1", "::1")


class System(BaseModel):
    """A coordinator in figures. `devices` and `runs`: state -> how many."""

    version: str
    started_at: datetime
    uptime_seconds: float
    devices: dict[str, int]
    runs: dict[str, int]
    held_polls: int


@router.get("/system")
def system(request: Request, services: Serving) -> System:
    """Version, uptime, and how many devices and runs there are in each state."""
    started = request.app.state.started_at
    devices, runs = services.database.read(_counted)
    return System(
        version=version(),
        started_at=started,
        uptime_seconds=(services.clock() - started).total_seconds(),
        devices=devices,
        runs=runs,
        held_polls=services.signals.held("device:"),
    )


@open_router.get("/healthz", include_in_schema=False)
def healthz(services: Serving) -> dict[str, str]:
    """Says that the process serves and its database answers; nothing else, to anybody."""
    services.database.read(lambda connection: connection.execute(select(1)).scalar_one())
    return {"status": "ok"}


@open_router.get("/metrics", include_in_schema=False)
def metrics(request: Request, services: Serving) -> Response:
    """For Prometheus. From this machine without a token, from elsewhere with it."""
    if request.client is None or request.client.host not in _LOOPBACK:
        _require_token(request, services)
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def version() -> str:
    """Of the installed package."""
    return metadata.version("fedloop")


def _require_token(request: Request, services: Services) -> None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    admin(services, HTTPAuthorizationCredentials(scheme=scheme, credentials=token) if token else None)


def _counted(connection: Connection) -> tuple[dict[str, int], dict[str, int]]:
    def by_state(table: Table) -> dict[str, int]:
        state = table.c.state
        rows = connection.execute(select(state, func.count()).group_by(state)).all()
        return {str(name): int(count) for name, count in rows}

    return by_state(tables.devices), by_state(tables.runs)
