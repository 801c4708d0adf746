"""The coordinator's own state: health, figures, metrics."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import version

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from sqlalchemy import select

from coordinator.api.deps import ServicesDep, authenticate, bearer
from coordinator.context.services import ServicesDep as ProcessServicesDep
from coordinator.db import tables

router = APIRouter(tags=["system"])
open_router = APIRouter(tags=["system"])

_LOOPBACK = ("127.0.0.1", "::1")


class System(BaseModel):
    """The coordinator's figures. `devices` and `runs`: state -> count."""

    version: str
    started_at: datetime
    uptime_seconds: float
    devices: dict[str, int]
    runs: dict[str, int]
    held_polls: int


@router.get("/system")
def system(request: Request, services: ServicesDep) -> System:
    """Version, uptime, and the number of devices and runs in each state."""
    started = request.app.state.started_at
    devices, runs = services.database.read(
        lambda at: [tables.count_by(at, table.c.state) for table in (tables.devices, tables.runs)]
    )
    return System(
        version=version("fedloop"),
        started_at=started,
        uptime_seconds=(services.clock() - started).total_seconds(),
        devices=devices,
        runs=runs,
        held_polls=services.signals.count_waiting("device:"),
    )


@open_router.get("/healthz", include_in_schema=False)
def healthz(services: ProcessServicesDep) -> dict[str, str]:
    """Whether the process serves and its database answers. Needs no token."""
    services.database.read(lambda connection: connection.execute(select(1)).scalar_one())
    return {"status": "ok"}


@open_router.get("/metrics", include_in_schema=False)
async def metrics(request: Request, services: ProcessServicesDep) -> Response:
    """Metrics for Prometheus. Requests from other machines need the token."""
    if request.client is None or request.client.host not in _LOOPBACK:
        await authenticate(request, services, await bearer(request))
    text = await run_in_threadpool(request.app.state.metrics.text)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
