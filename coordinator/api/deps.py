"""What routes of the operator API share: its caller, the base of requests, and the progress of an upload."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel

from coordinator.accounts.admin_token import require_admin_token
from coordinator.api.permissions import require_permission_of, route_key
from coordinator.context.services import Services, ServicesDep
from coordinator.errors import Refusal
from coordinator.identity.principals import ADMIN, Principal

bearer = HTTPBearer(
    auto_error=False, description="The admin token, in `admin.token` of the coordinator's home."
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
        Refusal: 401 `no_token` without a bearer token; 401 `bad_token` for a wrong one, 429 `too_many_guesses` after
            many; 503 `no_admin_token` if the coordinator has lost its own.
    """
    if credentials is None:
        raise Refusal(401, "no_token", "the operator API needs `Authorization: Bearer <admin token>`")
    if not _is_admin_token(services, credentials.credentials):
        services.admin_guesses.record("admin", request.client.host if request.client else None)
        raise Refusal(401, "bad_token", "this is not the admin token of this coordinator")
    request.state.principal = ADMIN
    return ADMIN


async def require_permission(
    request: Request, principal: Annotated[Principal, Depends(authenticate)]
) -> Principal:
    """Who makes the request, if their role may use its route.

    Raises:
        Refusal: as `authenticate`; 403 `forbidden`.
    """
    require_permission_of(principal, route_key(request))
    return principal


PrincipalDep = Annotated[Principal, Depends(require_permission)]
"""Type of a route's parameter that receives who makes the request."""


def has_admin_token(services: Services, request: Request) -> bool:
    """Whether a request carries the admin token, for code that runs before `authenticate` can refuse."""
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    return _is_admin_token(services, token) and scheme.lower() == "bearer"


def _is_admin_token(services: Services, token: str) -> bool:
    expected = require_admin_token(services.settings.home)
    return hmac.compare_digest(token.encode(), expected.encode())
