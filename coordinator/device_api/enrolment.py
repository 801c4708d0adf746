"""How a device gets in and out: the CA to pin, enrolment, renewal, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sqlalchemy import Connection

from coordinator import enrolment
from coordinator.api.deps import Serving
from coordinator.device_api.bodies import message_of
from coordinator.device_api.identity import Calling
from coordinator.services import Services
from edge_client.wire.device import EnrolRequest, RenewRequest, to_json

T = TypeVar("T")

router = APIRouter()


@router.get("/ca")
async def ca(services: Serving) -> Response:
    """The CA certificate, PEM. A device believes it only if its hash is the one in its token."""
    return Response(services.authority.ca_pem, media_type="application/x-pem-file")


@router.post("/enrol")
async def enrol(request: Request, services: Serving) -> Mapping[str, Any]:
    said = await message_of(EnrolRequest, request)
    return to_json(
        await _written(
            services,
            lambda at: enrolment.enrol(at, services.authority, services.settings, said, services.clock()),
        )
    )


@router.post("/renew")
async def renew(request: Request, services: Serving) -> Mapping[str, Any]:
    said = await message_of(RenewRequest, request)
    return to_json(
        await _written(
            services,
            lambda at: enrolment.renew(at, services.authority, services.settings, said, services.clock()),
        )
    )


@router.post("/leave")
async def leave(caller: Calling, services: Serving) -> Mapping[str, Any]:
    await _written(services, lambda at: enrolment.leave(at, caller.id, services.clock()))
    live = (f"run:{deployment.run}" for deployment in services.deployments.active())
    services.signals.notify(f"device:{caller.id}", *live)
    services.ticks.forget(caller.id)
    return {}


async def _written(services: Services, work: Callable[[Connection], T]) -> T:
    done = await asyncio.wrap_future(services.database.write(work))
    services.signals.notify("events")
    return done
