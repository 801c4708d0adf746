"""Operator API: sign in at an OpenID provider, with the code flow.

    1. `begin`      the browser gets a cookie, and the address of the provider with the state, the nonce and the PKCE challenge
    2. the provider  asks who it is, and sends the browser to the redirect URI with a code
    3. `complete`   our page, or the command that listens there, passes the code on; the coordinator redeems it and checks the
                    ID token

The page calls both from its own origin, so the session's cookie stays `SameSite=Strict`, and a refusal is an answer that it can show.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from coordinator.api.cookies import (
    require_own_origin,
    require_private_connection,
    set_sign_in_cookie,
    sign_in_secret,
)
from coordinator.api.deps import RequestBody, address_of
from coordinator.api.session import Session, bad_sign_in, begin_session_of
from coordinator.context.services import Services, ServicesDep
from coordinator.errors import Refusal
from coordinator.identity.external_accounts import Subject, account_of
from coordinator.identity.principals import Role
from coordinator.identity.setup_links import write_link
from coordinator.identity.users import UserRow
from coordinator.oidc.configuration import CALLBACK_PATH
from coordinator.oidc.provider import Provider
from edge_client.wire.strict import printable

router = APIRouter(tags=["session"])
open_router = APIRouter(tags=["session"])
"""Routes for which nobody has to be signed in."""

_LOOPBACK = ("127.0.0.1", "::1")
_NAME_CLAIMS = ("preferred_username", "email")

_log = structlog.get_logger("fedloop.people")
T = TypeVar("T")


class SignInMethods(BaseModel):
    """How people may sign in."""

    oidc: str | None = Field(description="Host of the OpenID provider; null without one.")


class OidcRole(BaseModel):
    """The role of users whose claim has this value, in a project; null: in all."""

    value: str
    role: Role
    project: str | None


class OidcConfiguration(BaseModel):
    """The OpenID provider, as the options of `fedloop serve` have it. The client's secret stays with the coordinator."""

    issuer: str
    client_id: str
    has_secret: bool
    scope: str
    claim: str = Field(description="Of the ID token; its values give roles.")
    roles: list[OidcRole] = Field(description="In each project the first one counts whose value a user has.")


class OidcSettings(BaseModel):
    provider: OidcConfiguration | None = Field(description="Null: none is configured.")
    callback_path: str = Field(description="Of the console: the redirect URI to register at a provider.")


class OidcBegin(RequestBody):
    redirect_uri: str | None = Field(
        default=None,
        max_length=200,
        description="Where a command on this machine listens: http://127.0.0.1:PORT/… Null: the console.",
    )


class OidcBegun(BaseModel):
    authorization_url: str


class OidcComplete(RequestBody):
    """The parameters with which the provider sent the browser back."""

    state: str = Field(max_length=200)
    code: str | None = Field(default=None, max_length=4096)
    iss: str | None = Field(default=None, max_length=500)
    error: str | None = Field(default=None, max_length=200)


@open_router.get("/session/methods")
def get_methods(services: ServicesDep) -> SignInMethods:
    """How people may sign in, besides with a password or a token."""
    provider = services.oidc
    return SignInMethods(oidc=None if provider is None else provider.configuration.host)


@router.get("/oidc")
def get_oidc_settings(services: ServicesDep) -> OidcSettings:
    """The OpenID provider that people may sign in at."""
    if services.oidc is None:
        return OidcSettings(provider=None, callback_path=CALLBACK_PATH)
    found = services.oidc.configuration
    return OidcSettings(
        provider=OidcConfiguration(
            issuer=found.issuer,
            client_id=found.client_id,
            has_secret=bool(found.client_secret),
            scope=found.scope,
            claim=found.claim,
            roles=[OidcRole(**vars(each)) for each in found.roles],
        ),
        callback_path=CALLBACK_PATH,
    )


@open_router.post("/session/oidc/begin")
async def begin_oidc(
    body: OidcBegin, request: Request, response: Response, services: ServicesDep
) -> OidcBegun:
    """Begins a sign-in at the provider, by this browser only.

    404 `oidc_off` without a provider; 429 `too_many_guesses`; 503 `oidc_unavailable`; 403 `needs_tls`, `csrf`.
    """
    provider = _provider(services)
    require_private_connection(services, request)
    require_own_origin(request, required=body.redirect_uri is None)
    redirect_uri = _redirect_uri(request, body.redirect_uri)
    state, pending = services.pending_sign_ins.begin(redirect_uri, address_of(request), services.clock())
    url = await _ask(provider, partial(provider.authorization_url, pending, state))
    set_sign_in_cookie(services, request, response, pending.browser)
    return OidcBegun(authorization_url=url)


@open_router.post("/session/oidc", status_code=201)
async def complete_oidc(
    body: OidcComplete, request: Request, response: Response, services: ServicesDep
) -> Session:
    """Ends a sign-in at the provider, and begins a session. A new user needs a role, which the provider's claim gives.

    401 `oidc_state`, `oidc_refused`, `oidc_issuer`, `oidc_code`, `id_token_…`, `bad_sign_in` for a disabled user;
    403 `oidc_no_role`; 503 `oidc_unavailable`.
    """
    provider = _provider(services)
    require_private_connection(services, request)
    require_own_origin(request, required=False)
    pending = services.pending_sign_ins.take(body.state, sign_in_secret(services, request), services.clock())
    await _ask(provider, partial(provider.require_own_answer, body.iss))
    if body.code is None:
        reason = printable(body.error or "it sent no code")
        raise Refusal(401, "oidc_refused", f"{provider.configuration.host} refused the sign-in: {reason}")
    id_token = await _ask(provider, partial(provider.redeem, body.code, pending))
    claims = await _ask(provider, partial(provider.claims, id_token, pending, services.clock()))
    user = await _account(services, provider, claims)
    session = await begin_session_of(services, request, response, user)
    _log.info("signed_in", name=user.name, issuer=provider.configuration.issuer)
    return session


def _provider(services: Services) -> Provider:
    if services.oidc is None:
        raise Refusal(404, "oidc_off", "this coordinator has no OpenID provider; `fedloop serve` names one")
    return services.oidc


async def _ask(provider: Provider, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(provider.threads, work)


def _redirect_uri(request: Request, wanted: str | None) -> str:
    """Our own page, whose origin was checked, or a port of loopback, where a command listens (RFC 8252, section 7.3)."""
    if wanted is None:
        return f"{request.headers['origin']}{CALLBACK_PATH}"
    parts = urlsplit(wanted)
    if parts.scheme != "http" or parts.hostname not in _LOOPBACK or parts.query or parts.fragment:
        raise Refusal(422, "malformed", "redirect_uri: expected http://127.0.0.1:PORT/PATH")
    return wanted


async def _account(services: Services, provider: Provider, claims: Mapping[str, Any]) -> UserRow:
    configuration = provider.configuration
    names = tuple(claims.get(name) for name in _NAME_CLAIMS)
    subject = Subject(configuration.issuer, claims["sub"], names)
    roles, now = configuration.roles_of(claims), services.clock()
    find = partial(account_of, subject=subject, roles=roles, projects=configuration.projects, now=now)
    user = await services.write(find)
    if user is None:
        _log.warning("sign_in_without_role", issuer=configuration.issuer, claim=configuration.claim)
        raise Refusal(
            403,
            "oidc_no_role",
            f"you have no role here: your claim {configuration.claim!r} at {configuration.host} gives none; ask an admin",
        )
    await asyncio.to_thread(write_link, services.settings.home, None)  # it ended with the first user
    if user.disabled_at is not None:
        raise bad_sign_in()
    return user
