"""The cookie of a browser's session, and what protects it: which connections may have one, and which pages may use it.

Over TLS, directly or by a proxy on this machine that sends `X-Forwarded-Proto: https`, the cookie is `__Host-fedloop-session`:
only over TLS, only for this host. Over plain HTTP on loopback it is `fedloop-session-<port>`; browsers share cookies among
the ports of a host, so the name has the port. Both are HttpOnly and SameSite=Strict.

A change needs, besides the cookie, the header `X-CSRF-Token` and an `Origin` of ours: another site's page can make a browser
send requests, but knows no token and cannot choose the origin.
"""

from __future__ import annotations

import hmac
from datetime import timedelta
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import Response

from coordinator.context.services import Services
from coordinator.errors import Refusal
from coordinator.identity.sessions import LIFETIME, csrf_token
from coordinator.oidc.pending import LIFETIME as PENDING_LIFETIME

CSRF_HEADER = "X-CSRF-Token"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def session_secret(services: Services, request: Request) -> str | None:
    """The secret in the session cookie of a request; None without one."""
    return request.cookies.get(_cookie_name(services, request, "session"))


def set_session_cookie(services: Services, request: Request, response: Response, secret: str) -> None:
    """Leaves the secret of a session in the browser, and the response in no cache."""
    _set_cookie(services, request, response, "session", secret, LIFETIME)


def sign_in_secret(services: Services, request: Request) -> str | None:
    """The secret of the sign-in at the OpenID provider that this browser began; None without one."""
    return request.cookies.get(_cookie_name(services, request, "oidc"))


def set_sign_in_cookie(services: Services, request: Request, response: Response, secret: str) -> None:
    """Binds a sign-in at the OpenID provider to this browser."""
    _set_cookie(services, request, response, "oidc", secret, PENDING_LIFETIME)


def _set_cookie(
    services: Services, request: Request, response: Response, kind: str, secret: str, lifetime: timedelta
) -> None:
    response.headers["Cache-Control"] = "no-store"
    response.set_cookie(
        _cookie_name(services, request, kind),
        secret,
        max_age=int(lifetime.total_seconds()),
        path="/",
        secure=_is_secure(request),
        httponly=True,
        samesite="strict",
    )


def clear_session_cookie(services: Services, request: Request, response: Response) -> None:
    response.delete_cookie(
        _cookie_name(services, request, "session"),
        path="/",
        secure=_is_secure(request),
        httponly=True,
        samesite="strict",
    )


def require_private_connection(services: Services, request: Request) -> None:
    """Requires that passwords and cookies are not sent over a network in clear.

    Raises:
        Refusal: 403 `needs_tls`.
    """
    if not (_is_secure(request) or request.url.hostname in _LOOPBACK or services.settings.insecure_operator):
        raise Refusal(
            403,
            "needs_tls",
            "passwords are taken over TLS or on loopback only: use https, or a tunnel to localhost; a proxy that ends TLS must "
            "send `X-Forwarded-Proto: https`",
        )


def require_own_origin(request: Request, *, required: bool) -> None:
    """Requires that a request which names an origin comes from a page of ours. `required`: that it names one.

    Raises:
        Refusal: 403 `csrf`.
    """
    origin = request.headers.get("origin")
    if origin is None and not required:
        return
    parts = urlsplit(origin or "")
    schemes = ("https",) if _is_secure(request) else ("http", "https")
    if parts.scheme not in schemes or parts.netloc.lower() != request.headers.get("host", "").lower():
        raise Refusal(
            403,
            "csrf",
            f"a change by a session must come from this coordinator's own page, not from {origin!r:.100}",
        )


def require_csrf_token(request: Request, secret: str) -> None:
    """Requires the token that belongs to a session.

    Raises:
        Refusal: 403 `csrf`.
    """
    given = request.headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(given.encode(), csrf_token(secret).encode()):
        raise Refusal(
            403,
            "csrf",
            f"a change by a session needs the header {CSRF_HEADER} with the token of GET /api/v1/session",
        )


def _cookie_name(services: Services, request: Request, kind: str) -> str:
    if _is_secure(request):
        return f"__Host-fedloop-{kind}"
    return f"fedloop-{kind}-{services.settings.operator.port}"


def _is_secure(request: Request) -> bool:
    return request.url.scheme == "https"
