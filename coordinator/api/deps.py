"""What routes of both APIs depend on: the services of this process, and who may call the operator API.

There is one admin token so far. It lies in `admin.token` in the coordinator's home, readable by its owner
only; replacing the file replaces the token, from the next request on.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from coordinator.errors import Refusal
from coordinator.services import Services
from edge_client.files import write_durably

TOKEN_FILE = "admin.token"

_bearer = HTTPBearer(
    auto_error=False, description="The admin token, in `admin.token` of the coordinator's home."
)


def services_of(request: Request) -> Services:
    """The services of the process that serves this request."""
    services: Services = request.app.state.services
    return services


Serving = Annotated[Services, Depends(services_of)]
"""The type of a route's argument that gets the services."""


def admin(
    services: Serving,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> None:
    """Lets the admin pass.

    Raises:
        Refusal: 401 `no_token` without a bearer token, 401 `bad_token` with another one.
    """
    if credentials is None:
        raise Refusal(401, "no_token", "the operator API needs `Authorization: Bearer <admin token>`")
    given, expected = credentials.credentials.encode(), read_admin_token(services.settings.home).encode()
    if not hmac.compare_digest(given, expected):
        raise Refusal(401, "bad_token", "this is not the admin token of this coordinator")


def read_admin_token(home: Path) -> str:
    """The admin token of the coordinator whose home this is.

    Raises:
        OSError: there is none, or this user may not read it.
    """
    return (home / TOKEN_FILE).read_text("ascii").strip()


def ensure_admin_token(home: Path) -> None:
    """Makes the token file at first start; one that is there is kept, and closed to others."""
    path = home / TOKEN_FILE
    if not path.exists():
        write_durably(path, secrets.token_urlsafe(32).encode() + b"\n")  # home itself is closed to others
    path.chmod(0o600)
