"""What routes of the operator API share: its caller, the base of requests, and the progress of an upload."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
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
from coordinator.api.permissions import require_permission_of, route_key
from coordinator.context.services import Services, ServicesDep
from coordinator.errors import Refusal
from coordinator.identity import access_tokens, sessions
from coordinator.identity.principals import ADMIN, Principal

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
    services: ServicesDep,
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
    """Who makes a request; None if its credentials are missing, wrong or no longer valid. Decides nothing else.

    Raises:
        Refusal: 503 `no_admin_token`.
    """
    if not hasattr(request.state, "principal"):
        request.state.principal = await _find_principal(services, request, records_use=True)
    principal: Principal | None = request.state.principal
    return principal


async def is_signed_in_still(services: Services, request: Request, principal: Principal) -> bool:
    """Whether the credentials of a request in progress still are those of this principal, with the same role.

    For answers that last, such as a stream of events. Looking counts as no use: it does not keep a session alive.
    """
    return await _find_principal(services, request, records_use=False) == principal


def address_of(request: Request) -> str | None:
    return request.client.host if request.client else None


async def require_permission(
    request: Request, services: ServicesDep, principal: Annotated[Principal, Depends(authenticate)]
) -> Principal:
    """Who makes the request, if their role may use its route.

    Raises:
        Refusal: as `authenticate`; 403 `csrf` if a session makes a change from another site's page; 403 `forbidden`.
    """
    if principal.kind == "session" and request.method not in SAFE_METHODS:
        secret = session_secret(services, request)
        assert secret is not None  # the principal was found by it
        require_own_origin(request, required=True)
        require_csrf_token(request, secret)
    require_permission_of(principal, route_key(request))
    return principal


PrincipalDep = Annotated[Principal, Depends(require_permission)]
"""Type of a route's parameter that receives who makes the request."""


async def _find_principal(services: Services, request: Request, *, records_use: bool) -> Principal | None:
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    secret = session_secret(services, request)
    now = services.clock()
    find: Callable[[Connection], tuple[Principal, datetime | None] | None]
    if scheme.lower() == "bearer" and token:
        if not token.startswith(access_tokens.PREFIX):
            expected = require_admin_token(services.settings.home)
            return ADMIN if hmac.compare_digest(token.encode(), expected.encode()) else None
        find = partial(access_tokens.find_access_token, text=token, now=now)
    elif secret is not None:
        find = partial(sessions.find_session, secret=secret, now=now)
    else:
        return None
    found = await asyncio.to_thread(services.database.read, find)
    if found is None:
        return None
    principal, last_used_at = found
    if records_use and (last_used_at is None or now - last_used_at >= sessions.TOUCH):
        _record_use(services, principal, secret, now)
    return principal


def _record_use(services: Services, principal: Principal, secret: str | None, now: datetime) -> None:
    """Not awaited: a request does not fail because its use cannot be recorded."""
    if principal.credential is not None:
        services.database.write(
            partial(access_tokens.touch_access_token, token=principal.credential, now=now)
        )
    elif secret is not None:
        services.database.write(partial(sessions.touch_session, secret=secret, now=now))
