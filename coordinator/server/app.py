"""The two web applications of a coordinator, assembled from their routers.

`operator_app` serves people, the console and the command line; `device_app` serves devices. They share the
services of the process and one error format: `{"error": {"code": …, "message": …, **details}}`.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from sqlalchemy.exc import DataError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute

from coordinator.api import (
    audit,
    devices,
    events,
    experiments,
    models,
    oidc,
    open_round,
    participation,
    releases,
    rollouts,
    runs,
    session,
    statistics,
    system,
    tokens,
)
from coordinator.api.audit_recorder import AuditMiddleware, AuditRecorder, record_begin
from coordinator.api.datacenter import jobs
from coordinator.api.deps import identify, require_permission
from coordinator.api.people import access_tokens, projects, users
from coordinator.api.permissions import OPEN, require_complete, require_limited
from coordinator.api.privacy import spending
from coordinator.context.services import Services
from coordinator.device_api import checkin, downloads, enrolment, relays, secure, tasks, uploads
from coordinator.errors import Refusal, UserError
from coordinator.limits.request_bodies import ANONYMOUS_LIMIT_BYTES, ANONYMOUS_SECONDS, BODY_SECONDS
from coordinator.server.console import SecurityHeadersMiddleware, add_console
from coordinator.server.metrics import Metrics
from coordinator.server.middleware import BodyLimitMiddleware, RequestLogMiddleware, TrustedHostMiddleware
from coordinator.storage.blobs import BlobDamaged
from coordinator.storage.errors import is_damaged_database, is_disk_full, is_temporary, remedy
from edge_client.wire.device import PREFIX as DEVICE_PREFIX

if TYPE_CHECKING:
    from coordinator.jobs.service import JobService
    from coordinator.runs.service import RunService

OPERATOR_PREFIX = "/api/v1"
RETRY_SECONDS = 5
"""Sent with every response that fails because of the disk or the database."""
_ROUTERS = tuple(
    each.router
    for each in (
        devices,
        tokens,
        participation,
        experiments,
        runs,
        open_round,
        spending,
        jobs,
        statistics,
        models,
        releases,
        rollouts,
        events,
        system,
        session,
        oidc,
        users,
        projects,
        access_tokens,
        audit,
    )
)
"""Of the operator API: their routes need a permission."""
_OPEN_ROUTERS = (session.open_router, oidc.open_router)
BODY_LIMIT_BYTES = 4 * 2**20
"""Limit of a request to the operator API, such as an experiment or a list of serial numbers."""


class ProblemDetail(BaseModel):
    """`code` is stable and for programs, `message` for people. Some codes come with further keys."""

    model_config = {"extra": "allow"}

    code: str
    message: str


class Problem(BaseModel):
    """The body of every error response."""

    error: ProblemDetail


def operator_app(
    services: Services, run_service: RunService, metrics: Metrics, job_service: JobService | None = None
) -> FastAPI:
    """The operator API and the web console; the API's OpenAPI document is at `/api/openapi.json`.

    `job_service`: None if it runs no jobs.
    """
    app = _operator_routes()
    app.state.services = services
    app.state.runs = run_service
    app.state.jobs = job_service
    app.state.metrics = metrics
    app.state.started_at = services.clock()
    app.state.audit_recorder = AuditRecorder(services)
    add_console(app)
    app.add_middleware(
        BodyLimitMiddleware,
        limit_of=lambda request: _body_limit(services, request),
    )
    app.add_middleware(TrustedHostMiddleware, allowed=allowed_hosts(services))
    app.add_middleware(RequestLogMiddleware, api="operator", metrics=metrics, failure=_unexpected_failure)
    app.add_middleware(SecurityHeadersMiddleware)
    app.add_middleware(AuditMiddleware, recorder=app.state.audit_recorder)
    return app


def operator_document() -> dict[str, Any]:
    """The OpenAPI document of the operator API, which the console's client is generated from."""
    return _operator_routes().openapi()


def _operator_routes() -> FastAPI:
    app = _without_routes()
    app.router.routes.extend(_prepared_routes())
    return app


@cache
def _prepared_routes() -> tuple[BaseRoute, ...]:
    """The routes of every operator API of this process: FastAPI prepares them at the first request, which takes half a second.

    `dependency_overrides` of an app do not reach them.
    """
    require_complete(_ROUTERS, _OPEN_ROUTERS)
    require_limited(_ROUTERS)
    app = _without_routes()
    there = len(app.router.routes)
    for router in _OPEN_ROUTERS:
        app.include_router(router, prefix=OPERATOR_PREFIX)
    for router in _ROUTERS:
        app.include_router(
            router,
            prefix=OPERATOR_PREFIX,
            dependencies=[Depends(require_permission), Depends(record_begin)],
        )
    app.include_router(system.open_router)
    return tuple(app.router.routes[there:])


def _without_routes() -> FastAPI:
    return FastAPI(
        title="Fedloop operator API",
        version=version("fedloop"),
        docs_url=None,  # the page would load scripts from another site
        redoc_url=None,
        openapi_url="/api/openapi.json",
        generate_unique_id_function=_operation_id,
        exception_handlers=_ERROR_HANDLERS,
        responses={"4XX": {"model": Problem}, "5XX": {"model": Problem}, 422: {"model": Problem}},
    )


async def _body_limit(services: Services, request: Request) -> tuple[int, float]:
    """Bytes and seconds of a request's body: nothing from strangers but what the open routes need."""
    if (request.method, request.url.path.removeprefix(OPERATOR_PREFIX)) in OPEN:
        return ANONYMOUS_LIMIT_BYTES, ANONYMOUS_SECONDS
    try:
        is_known = await identify(services, request) is not None
    except Refusal as refusal:
        if refusal.code != "unknown_project":
            raise
        is_known = True  # the route refuses, which reads the body first
    return (BODY_LIMIT_BYTES if is_known else 0), BODY_SECONDS


def device_app(services: Services, metrics: Metrics) -> FastAPI:
    """The device API. Its contract is `edge_client.wire.device`, so it has no OpenAPI document."""
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers=_ERROR_HANDLERS,
    )
    app.state.services = services
    for routes in (enrolment, checkin, downloads, uploads, tasks, secure, relays):
        app.include_router(routes.router, prefix=DEVICE_PREFIX)
    app.add_middleware(RequestLogMiddleware, api="device", metrics=metrics, failure=_unexpected_failure)
    return app


def allowed_hosts(services: Services) -> frozenset[str]:
    """Host names that the operator API answers to. Addresses need no entry: DNS rebinding needs a name."""
    settings = services.settings
    return frozenset(name.lower() for name in ("localhost", settings.operator.host, *settings.names))


def _operation_id(route: APIRoute) -> str:
    """The name of the route's function in camel case, for generated clients."""
    first, *rest = route.name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def problem(status: int, code: str, message: str, **details: Any) -> JSONResponse:
    """A response in the error format."""
    return JSONResponse({"error": {"code": code, "message": message, **details}}, status)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    response = problem(error.status, error.code, str(error), **error.details)
    if error.retry_after_seconds is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if error.closes:
        response.headers["connection"] = "close"
    return response


async def _user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return problem(422, error.code, str(error))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return problem(422, "malformed", "; ".join(problems))


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "malformed")
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = problem(error.status_code, code, message[:500])
    response.headers.update(error.headers or {})
    return response


async def _data_error(request: Request, error: Exception) -> Response:
    """A value passed all checks, but the database cannot store it, such as text with a NUL."""
    return problem(422, "malformed", "the request holds text or a number that cannot be stored")


async def _client_disconnected(request: Request, error: Exception) -> Response:
    """Nobody reads this response: the client disconnected in the middle of a request."""
    return problem(400, "malformed", "the request ended before its body did")


_ERROR_HANDLERS: Any = {
    Refusal: _refusal,
    UserError: _user_error,
    RequestValidationError: _validation_error,
    HTTPException: _http_error,
    ClientDisconnect: _client_disconnected,
    DataError: _data_error,
}


def _unexpected_failure(error: Exception) -> Response:
    """An unexpected exception, or a failure of disk or database that the operator can fix."""
    if is_disk_full(error):
        return problem(507, "disk_full", "the coordinator's disk is full; free space there and try again")
    response = _unavailable(error)
    if response is None:
        return problem(500, "internal", "the coordinator failed; its log says why")
    response.headers["retry-after"] = str(RETRY_SECONDS)
    return response


def _unavailable(error: Exception) -> JSONResponse | None:
    """Names no paths: devices read it too. The log has them."""
    if isinstance(error, BlobDamaged):
        return problem(
            503,
            "blob_damaged",
            "the coordinator's disk has lost or changed this file; its log says which one",
        )
    if is_damaged_database(error):
        return problem(503, "database_damaged", "the coordinator's database is damaged; its log says more")
    if not is_temporary(error):
        return None
    if isinstance(error, OSError):
        return problem(
            503,
            "storage_unavailable",
            f"the coordinator's disk cannot be used at the moment; {remedy(error)}; its log says where",
        )
    return problem(
        503,
        "database_unavailable",
        f"the coordinator's database cannot be used at the moment; {remedy(error)}; its log says more",
    )
