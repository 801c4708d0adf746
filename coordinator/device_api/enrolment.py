"""A device's membership: the CA to pin, enrolment, renewal and leaving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from coordinator.accounts import enrolment
from coordinator.context.services import ServicesDep
from coordinator.device_api.identity import CallerDep
from coordinator.errors import Refusal
from coordinator.limits.request_bodies import read_anonymous_message
from edge_client.wire.device import EnrolRequest, RenewRequest, to_json

router = APIRouter()


@router.get("/ca")
async def ca(services: ServicesDep) -> Response:
    """The CA certificate in PEM. A device trusts it only if its token carries the same hash."""
    return Response(services.authority.ca_pem, media_type="application/x-pem-file")


@router.post("/enrol")
async def enrol(request: Request, services: ServicesDep) -> Mapping[str, Any]:
    message = await read_anonymous_message(EnrolRequest, request)
    try:
        answer = await services.write(
            lambda at: enrolment.enrol(at, services.authority, services.settings, message, services.clock())
        )
    except Refusal as refusal:
        if refusal.code == "token_unknown":
            services.enrolment_guesses.record("enrolment", request.client.host if request.client else None)
        raise
    services.signals.notify("events")
    return to_json(answer)


@router.post("/renew")
async def renew(request: Request, services: ServicesDep) -> Mapping[str, Any]:
    message = await read_anonymous_message(RenewRequest, request)
    answer = await services.write(
        lambda at: enrolment.renew(at, services.authority, services.settings, message, services.clock())
    )
    services.signals.notify("events")
    return to_json(answer)


@router.post("/leave")
async def leave(caller: CallerDep, services: ServicesDep) -> Mapping[str, Any]:
    await services.write(lambda at: enrolment.leave(at, caller, services.clock()))
    live = (f"run:{deployment.run}" for deployment in services.deployments.active())
    services.signals.notify(f"device:{caller}", "events", *live)
    services.device_log.forget(caller)
    return {}
