"""The coordinator's own state: health, figures, metrics."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from sqlalchemy import Connection, select

from coordinator.api.deps import ServicesDep, authenticate, bearer
from coordinator.context.services import ServicesDep as ProcessServicesDep
from coordinator.db import attention, tables
from coordinator.db.attention import WaitingRun
from coordinator.scheduling.matching import Presence

router = APIRouter(tags=["system"])
open_router = APIRouter(tags=["system"])

_UNRENEWED_SHARE = 0.2
"""Of a certificate's life: devices renew theirs earlier (`edge_client.transport.identity.RENEW_FROM`)."""
_LOOPBACK = ("127.0.0.1", "::1")


class System(BaseModel):
    """The coordinator's figures. `devices` and `runs`: state -> count; `presence`: of active devices."""

    version: str
    started_at: datetime
    uptime_seconds: float
    devices: dict[str, int]
    runs: dict[str, int]
    held_polls: int
    presence: dict[Presence, int]
    late_renewals: int = Field(
        description="Active devices whose certificate has expired or ends soon: they should have renewed it by now."
    )
    waiting_runs: list[WaitingRun] = Field(description="Live runs that do not go on, and why.")


@router.get("/system")
def system(request: Request, services: ServicesDep) -> System:
    """Version, uptime, the number of devices and runs in each state, and what may need a person."""
    started = request.app.state.started_at
    now = services.clock()

    def read(at: Connection) -> dict[str, Any]:
        unrenewed = services.settings.certificate_lifetime * _UNRENEWED_SHARE
        return {
            "devices": tables.count_by(at, tables.devices.c.state),
            "runs": tables.count_by(at, tables.runs.c.state),
            "presence": attention.presences(at, now),
            "late_renewals": attention.expiring_certificates(at, now, unrenewed),
            "waiting_runs": attention.waiting_runs(at),
        }

    return System(
        version=version("fedloop"),
        started_at=started,
        uptime_seconds=(now - started).total_seconds(),
        **services.database.read(read),
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
