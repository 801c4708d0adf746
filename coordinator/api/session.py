"""Operator API: sign in with a password, sign out, change the own password, and the first account."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Annotated

import structlog
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, SecretStr
from sqlalchemy import Connection

from coordinator.api.cookies import (
    clear_session_cookie,
    require_own_origin,
    require_private_connection,
    session_secret,
    set_session_cookie,
)
from coordinator.api.deps import PrincipalDep, RequestBody, address_of
from coordinator.context.services import Services, ServicesDep
from coordinator.errors import Refusal
from coordinator.identity import projects, sessions, setup_links, users
from coordinator.identity.access_tokens import revoke_all_access_tokens
from coordinator.identity.passwords import MAX_CHARACTERS, hash_password, is_password, require_strong
from coordinator.identity.principals import Kind, Principal, Role
from coordinator.identity.users import UserRow

open_router = APIRouter(tags=["session"])
"""Routes for which nobody has to be signed in."""
router = APIRouter(tags=["session"])

_log = structlog.get_logger("fedloop.people")

Password = Annotated[SecretStr, Field(max_length=MAX_CHARACTERS)]
UserName = Annotated[str, Field(min_length=1, max_length=64)]


class SignIn(RequestBody):
    name: UserName
    password: Password


class SetupRequest(RequestBody):
    """The first account, an admin."""

    secret: str = Field(min_length=1, max_length=200, description="What follows `#setup=` in the link.")
    name: UserName
    password: Password


class PasswordChange(RequestBody):
    current_password: Password
    new_password: Password


class Session(BaseModel):
    """Who makes requests with these credentials, and what they may do."""

    kind: Kind
    name: str
    role: Role
    grants: list[Role] = Field(description="Roles whose permissions the credentials have in `project`.")
    project: str | None = Field(
        description="Of this request; null if the user is in none, or in several and names none."
    )
    projects: list[str] = Field(description="Those that the header X-Fedloop-Project may name.")
    credential: str | None = Field(description="Id of the access token; null for others.")
    csrf_token: str | None = Field(
        description="For the header X-CSRF-Token of every change by this session; null for tokens."
    )
    expires_at: datetime | None = Field(description="When the session ends at the latest; null for tokens.")


class SessionsEnded(BaseModel):
    ended: int


@open_router.post("/session", status_code=201)
async def sign_in(body: SignIn, request: Request, response: Response, services: ServicesDep) -> Session:
    """Begins a session, whose secret is set as a cookie. A session that the browser had before ends.

    401 `bad_sign_in` for a wrong name or password, alike; 429 `too_many_guesses` after many; 403 `needs_tls`, `csrf`.
    """
    require_private_connection(services, request)
    require_own_origin(request, required=False)
    name, address = body.name.strip().lower(), address_of(request)
    services.sign_ins.attempt(name, address)
    user = await asyncio.to_thread(services.database.read, partial(users.find_user, name=name))
    if not await _matches(services, user, body.password) or user is None or user.disabled_at is not None:
        # The name of a user only: people type passwords into the wrong field.
        _log.warning("sign_in_refused", name=None if user is None else user.name)
        raise bad_sign_in()
    services.sign_ins.succeeded(name, address)
    session = await begin_session_of(services, request, response, user)
    _log.info("signed_in", name=name)
    return session


@open_router.post("/setup", status_code=201)
async def set_up(body: SetupRequest, request: Request, response: Response, services: ServicesDep) -> Session:
    """Creates the first account with the link that `fedloop serve` printed, and begins a session of it.

    403 `setup_link_ended`; 422 `weak_password`, `malformed`; 403 `needs_tls`, `csrf`.
    """
    require_private_connection(services, request)
    require_own_origin(request, required=False)
    now = services.clock()
    name = users.user_name(body.name)
    is_valid = partial(setup_links.is_valid, secret=body.secret, now=now)
    if not await asyncio.to_thread(services.database.read, is_valid):
        services.admin_guesses.record("setup", address_of(request))
        raise setup_links.setup_link_ended()
    password_hash = await _strong_hash(services, body.password, name)
    user = await services.write(
        lambda at: setup_links.use_setup_link(at, body.secret, name, password_hash, now)
    )
    await asyncio.to_thread(setup_links.write_link, services.settings.home, None)
    _log.info("first_user_added", name=name)
    return await begin_session_of(services, request, response, user)


@router.get("/session")
def get_session(
    principal: PrincipalDep, request: Request, response: Response, services: ServicesDep
) -> Session:
    """Who makes this request: the admin token, a session or an access token."""
    response.headers["Cache-Control"] = "no-store"
    theirs = services.database.read(partial(projects.open_to, principal=principal))
    if principal.kind != "session":
        return _render(principal, theirs)
    secret = session_secret(services, request)
    assert secret is not None  # the principal was found by it
    until = services.database.read(partial(sessions.end_of_session, secret=secret))
    return _render(principal, theirs, secret, until)


@router.delete("/session", status_code=204)
def sign_out(principal: PrincipalDep, request: Request, response: Response, services: ServicesDep) -> None:
    """Ends this session. A token stays as it is."""
    secret = session_secret(services, request)
    if principal.kind == "session" and secret is not None:
        services.commit(partial(sessions.end_session, secret=secret))
        clear_session_cookie(services, request, response)


@router.post("/session/end-all")
def end_all_sessions(
    principal: PrincipalDep,
    request: Request,
    response: Response,
    services: ServicesDep,
    access_tokens: Annotated[bool, Query(description="Revoke all access tokens of the user too.")] = False,
) -> SessionsEnded:
    """Signs the user out everywhere, here too."""
    user, now = _own_account(principal), services.clock()

    def end(connection: Connection) -> int:
        if access_tokens:
            revoke_all_access_tokens(connection, user, now)
        return users.end_sessions(connection, user)

    ended = services.commit(end)
    clear_session_cookie(services, request, response)
    return SessionsEnded(ended=ended)


@router.put("/session/password", status_code=204)
async def change_own_password(
    body: PasswordChange,
    principal: PrincipalDep,
    request: Request,
    response: Response,
    services: ServicesDep,
) -> None:
    """Changes the own password. All other sessions end; this one goes on with a new secret.

    403 `bad_password`: the current one is wrong; 422 `weak_password`; 429 `too_many_guesses`.
    """
    _own_account(principal)
    require_private_connection(services, request)
    address = address_of(request)
    services.sign_ins.attempt(principal.name, address)
    user = await asyncio.to_thread(services.database.read, partial(users.find_user, name=principal.name))
    if user is None or not await _matches(services, user, body.current_password):
        raise Refusal(403, "bad_password", "this is not the current password")
    services.sign_ins.succeeded(principal.name, address)
    password_hash = await _strong_hash(services, body.new_password, principal.name)
    now = services.clock()

    def change(connection: Connection) -> None:
        users.set_password(connection, user.id, password_hash, now)

    if principal.kind == "session":
        changed = replace(user, password_hash=password_hash)
        await begin_session_of(services, request, response, changed, change)
    else:
        await services.write(change)


async def begin_session_of(
    services: Services,
    request: Request,
    response: Response,
    user: UserRow,
    first: Callable[[Connection], None] = lambda connection: None,
) -> Session:
    """Begins a session of a user who has just proved who they are, in place of the one that the browser had.

    `first`: written in the same transaction, so that either both are there or neither.
    """
    before, now = session_secret(services, request), services.clock()

    def begin(connection: Connection) -> tuple[str, datetime]:
        first(connection)
        current = users.find_user(connection, user.name)
        if current is None or current.disabled_at is not None or current.password_hash != user.password_hash:
            raise bad_sign_in()  # changed meanwhile
        if before is not None:
            sessions.end_session(connection, before)
        return sessions.begin_session(connection, user.id, now)

    secret, until = await services.write(begin)
    set_session_cookie(services, request, response, secret)
    found = sessions.session_principal(user.id, user.name, user.role)
    principal, theirs = await asyncio.to_thread(services.database.read, partial(_in_project, principal=found))
    request.state.principal = principal  # for the audit log: who signed in
    return _render(principal, theirs, secret, until)


def _in_project(connection: Connection, principal: Principal) -> tuple[Principal, list[str]]:
    """The principal in their usual project, and the projects that they may name."""
    return projects.enter(connection, principal, None), projects.open_to(connection, principal)


async def _matches(services: Services, user: UserRow | None, password: SecretStr) -> bool:
    password_hash = None if user is None else user.password_hash
    work = partial(is_password, password_hash, password.get_secret_value())
    return await asyncio.get_running_loop().run_in_executor(services.password_threads, work)


async def _strong_hash(services: Services, password: SecretStr, name: str) -> str:
    require_strong(password.get_secret_value(), name)
    work = partial(hash_password, password.get_secret_value())
    return await asyncio.get_running_loop().run_in_executor(services.password_threads, work)


def _own_account(principal: Principal) -> str:
    if principal.user is None:
        raise Refusal(409, "no_account", "the admin token belongs to no user; sign in, or name the user")
    return principal.user


def bad_sign_in() -> Refusal:
    """One answer, so that it tells a stranger nothing."""
    return Refusal(401, "bad_sign_in", "wrong name or password, or the account is disabled")


def _render(
    principal: Principal, theirs: list[str], secret: str | None = None, until: datetime | None = None
) -> Session:
    return Session(
        kind=principal.kind,
        name=principal.name,
        role=principal.role,
        grants=sorted(principal.grants),
        project=principal.project,
        projects=theirs,
        credential=principal.credential,
        csrf_token=None if secret is None else sessions.csrf_token(secret),
        expires_at=until,
    )
