"""The two web applications of a coordinator, put together from their routers.

`operator_app` is for people, the console and the command line; `device_app` is for devices. They share the
services of the process, and one form of error: `{"error": {"code": …, "message": …, **details}}`.
"""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from sqlalchemy.exc import DataError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from coordinator.api import devices, events, models, releases, rollouts, runs, system, tokens, why
from coordinator.api.deps import admin
from coordinator.db.store import is_disk_full
from coordinator.device_api import answers, blobs, checkin, enrolment, uploads
from coordinator.device_api import releases as device_releases
from coordinator.errors import Refusal, UserError
from coordinator.metrics import Metrics
from coordinator.middleware import LimitedBodies, Observed, OnlyHosts
from coordinator.runs import RunService
from coordinator.services import Services
from edge_client.wire.device import PREFIX as DEVICE_PREFIX

OPERATOR_PREFIX = "/api/v1"
BODY_LIMIT_BYTES = 4 * 2**20
"""Of one request to the operator API: experiments and lists of serial numbers."""


class ProblemDetail(BaseModel):
    """`code` is stable and for programs, `message` for people. Some codes carry further keys."""

    model_config = {"extra": "allow"}

    code: str
    message: str


class Problem(BaseModel):
    """What every refusal and failure looks like."""

    error: ProblemDetail


def operator_app(services: Services, runs_of_process: RunService, metrics: Metrics) -> FastAPI:
    """The operator API; its OpenAPI document is at `/api/openapi.json`."""
    app = FastAPI(
        title="Fedloop operator API",
        version=system.version(),
        docs_url=None,  # the page would load its script from another site
        redoc_url=None,
        openapi_url="/api/openapi.json",
        generate_unique_id_function=_operation_id,
        responses={"4XX": {"model": Problem}, "5XX": {"model": Problem}, 422: {"model": Problem}},
    )
    app.state.services = services
    app.state.runs = runs_of_process
    app.state.metrics = metrics
    app.state.started_at = services.clock()
    for routes in (devices, tokens, why, runs, models, releases, rollouts, events, system):
        app.include_router(routes.router, prefix=OPERATOR_PREFIX, dependencies=[Depends(admin)])
    app.include_router(system.open_router)
    _answer_errors(app)
    app.add_middleware(LimitedBodies, limit_bytes=BODY_LIMIT_BYTES)
    app.add_middleware(OnlyHosts, allowed=allowed_hosts(services))
    app.add_middleware(Observed, api="operator", metrics=metrics, failure=_failure)
    return app


def device_app(services: Services, metrics: Metrics) -> FastAPI:
    """The device API. Its contract is `edge_client.wire.device`, so it has no OpenAPI document."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.services = services
    for routes in (enrolment, checkin, blobs, uploads, answers, device_releases):
        app.include_router(routes.router, prefix=DEVICE_PREFIX)
    _answer_errors(app)
    app.add_middleware(Observed, api="device", metrics=metrics, failure=_failure)
    return app


def allowed_hosts(services: Services) -> frozenset[str]:
    """Names the operator API answers to. Addresses need no entry: rebinding needs a name."""
    settings = services.settings
    return frozenset(name.lower() for name in ("localhost", settings.operator_host, *settings.names))


def _operation_id(route: APIRoute) -> str:
    """The route's function in camel case: what a generated client calls it."""
    first, *rest = route.name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _answer_errors(app: FastAPI) -> None:
    app.add_exception_handler(Refusal, _refusal)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(DataError, _cannot_be_stored)


def problem(status: int, code: str, message: str, **details: Any) -> JSONResponse:
    """An error in the one form."""
    return JSONResponse({"error": {"code": code, "message": message, **details}}, status)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return problem(error.status, error.code, str(error), **error.details)


async def _user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return problem(422, error.code, str(error))


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return problem(422, "malformed", "; ".join(found))


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "malformed")
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = problem(error.status_code, code, message[:500])
    answer.headers.update(error.headers or {})
    return answer


async def _cannot_be_stored(request: Request, error: Exception) -> Response:
    """A value that passed all checks and that the database has no place for, such as text with a NUL."""
    return problem(422, "malformed", "the request holds text or a number that cannot be stored")


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this answer: its client went away in the middle of a request."""
    return problem(400, "malformed", "the request ended before its body did")


def _failure(error: Exception) -> Response:
    """What nobody foresaw, or a full disk, which its owner can mend."""
    if is_disk_full(error):
        return problem(507, "disk_full", "the coordinator's disk is full; free space there and try again")
    return problem(500, "internal", "the coordinator failed; its log says why")
