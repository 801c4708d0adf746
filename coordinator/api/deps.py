"""What routes of the operator API share: its caller, the base of requests, and the progress of an upload."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel
from sqlalchemy import Connection

from coordinator.accounts.admin_token import require_admin_token
from coordinator.api.cookies import SAFE_METHODS, require_csrf_token, require_own_origin, session_secret
from coordinator.api.permissions import OF_COORDINATOR, OF_USER, require_permission_of, route_key
from coordinator.context.services import Services
from coordinator.context.services import ServicesDep as ProcessServicesDep
from coordinator.db.project_filter import NOBODY
from coordinator.errors import Refusal
from coordinator.identity import access_tokens, projects, sessions
from coordinator.identity.principals import ADMIN, Principal

PROJECT_HEADER = "X-Fedloop-Project"

bearer = HTTPBearer(
    auto_error=False,
    description="An access token, or the admin token in `admin.token` of the coordinator's home. Browsers have a session's "
    "cookie instead.",
)


class RequestBody(BaseModel):
    """A request in JSON; unknown keys are refused."""

    model_config = {"extra": "forbid"}


class FileProgress(BaseModel):
    """Bytes received of an upload."""

    offset: int


async def authenticate(
    request: Request,
    services: ProcessServicesDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
) -> Principal:
    """Who makes the request; also as `request.state.principal` from then on.

    Raises:
        Refusal: 401 `no_token` without credentials; 401 `bad_token` for a wrong token, 429 `too_many_guesses` after many;
            401 `session_ended`; 503 `no_admin_token` if the coordinator has lost its own.
    """
    principal = await identify(services, request)
    if principal is not None:
        return principal
    if credentials is not None:
        services.admin_guesses.record("admin", address_of(request))
        raise Refusal(
            401,
            "bad_token",
            "this token is neither the admin token of this coordinator nor a valid access token",
        )
    if session_secret(services, request) is not None:
        raise Refusal(401, "session_ended", "this session has ended; sign in again")
    raise Refusal(
        401,
        "no_token",
        "the operator API needs `Authorization: Bearer <access token or admin token>`, or a session",
    )


async def identify(services: Services, request: Request) -> Principal | None:
    """Who makes a request, in which project; None if the credentials are missing, wrong or no longer valid.

    Raises:
        Refusal: 404 `unknown_project`: it names a project that is not theirs; 503 `no_admin_token`.
    """
    if not hasattr(request.state, "principal"):
        request.state.principal = await _find_principal(services, request, records_use=True)
    principal: Principal | None = request.state.principal
    return principal


async def is_signed_in_still(services: Services, request: Request, principal: Principal) -> bool:
    """Whether the credentials of a request in progress still are those of this principal, with the same role in
    its project.

    For answers that last, such as a stream of events. Looking counts as no use: it does not keep a session alive.
    """
    try:
        return await _find_principal(services, request, records_use=False) == principal
    except Refusal as refusal:
        if refusal.code != "unknown_project":
            raise
        return False  # the user was removed from the project


def address_of(request: Request) -> str | None:
    return request.client.host if request.client else None


async def require_permission(
    request: Request, services: ProcessServicesDep, principal: Annotated[Principal, Depends(authenticate)]
) -> Principal:
    """Who makes the request, if their role may use its route.

    Raises:
        Refusal: as `authenticate`; 403 `csrf` if a session makes a change from another site's page; 403 `forbidden`,
            `no_project`; 409 `project_archived`.
    """
    if principal.kind == "session" and request.method not in SAFE_METHODS:
        secret = session_secret(services, request)
        assert secret is not None  # the principal was found by it
        require_own_origin(request, required=True)
        require_csrf_token(request, secret)
    route = route_key(request)
    require_permission_of(principal, route)
    if (
        principal.is_read_only
        and request.method not in SAFE_METHODS
        and route not in OF_USER | OF_COORDINATOR
    ):
        raise Refusal(
            409, "project_archived", f"the project {principal.project} is archived: nothing changes in it"
        )
    return principal


PrincipalDep = Annotated[Principal, Depends(require_permission)]
"""Type of a route's parameter that receives who makes the request."""


def services_of_project(services: ProcessServicesDep, principal: PrincipalDep) -> Services:
    """The services of this process, limited to the project of the request."""
    return services.for_project(principal.project or NOBODY)


ServicesDep = Annotated[Services, Depends(services_of_project)]
"""Type of a route's parameter that receives the services, limited to the project of the request."""


def _named_project(request: Request) -> str | None:
    """The project that a request names: in a header, or where none can be set, such as a link, as `?project=`."""
    return request.headers.get(PROJECT_HEADER) or request.query_params.get("project") or None


async def _find_principal(services: Services, request: Request, *, records_use: bool) -> Principal | None:
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    secret, wanted = session_secret(services, request), _named_project(request)
    now = services.clock()
    find: Callable[[Connection], tuple[Principal, datetime | None] | None]
    if scheme.lower() == "bearer" and token:
        if not token.startswith(access_tokens.PREFIX):
            expected = require_admin_token(services.settings.home)
            is_admin = hmac.compare_digest(token.encode(), expected.encode())
            return await _admin_in(services, wanted) if is_admin else None
        find = partial(access_tokens.find_access_token, text=token, now=now)
    elif secret is not None:
        find = partial(sessions.find_session, secret=secret, now=now)
    else:
        return None

    def read(connection: Connection) -> tuple[Principal, datetime | None] | None:
        found = find(connection)
        return found and (projects.enter(connection, found[0], wanted), found[1])

    found = await asyncio.to_thread(services.database.read, read)
    if found is None:
        return None
    principal, last_used_at = found
    if records_use and (last_used_at is None or now - last_used_at >= sessions.TOUCH):
        _record_use(services, principal, secret, now)
    return principal


async def _admin_in(services: Services, wanted: str | None) -> Principal:
    """The holder of the admin token in this project, by default `default`."""
    if wanted in (None, ADMIN.project):
        return ADMIN
    enter = partial(projects.enter, principal=replace(ADMIN, project=None), wanted=wanted)
    return await asyncio.to_thread(services.database.read, enter)


def _record_use(services: Services, principal: Principal, secret: str | None, now: datetime) -> None:
    """Not awaited: a request does not fail because its use cannot be recorded."""
    if principal.credential is not None:
        services.database.write(
            partial(access_tokens.touch_access_token, token=principal.credential, now=now)
        )
    elif secret is not None:
        services.database.write(partial(sessions.touch_session, secret=secret, now=now))
