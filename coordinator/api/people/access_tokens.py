"""Operator API: access tokens of the caller; admins see and revoke those of everybody."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from coordinator.api.deps import PrincipalDep, RequestBody, ServicesDep
from coordinator.api.session import UserName
from coordinator.errors import Refusal
from coordinator.identity import access_tokens, users
from coordinator.identity.access_tokens import MAX_DAYS, AccessTokenRow
from coordinator.identity.principals import Principal, Role
from coordinator.identity.users import UserRow

router = APIRouter(tags=["access tokens"])


class NewAccessToken(RequestBody):
    name: str = Field(min_length=1, max_length=64, description="What it is for, such as a machine's name.")
    role: Role | None = Field(None, description="At most the owner's. Default: the owner's.")
    days: float = Field(90.0, gt=0, le=MAX_DAYS, description="Until it expires.")
    user: UserName | None = Field(None, description="The owner, if not the caller; for admins.")
    project: str | None = Field(
        None,
        max_length=63,
        description="The only one that it may be used for. Default: every one of the owner's.",
    )


class AccessToken(BaseModel):
    """An access token. Its text is not stored."""

    id: str
    user: str
    name: str
    role: Role
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None = Field(description="Within a minute.")
    revoked_at: datetime | None
    project: str | None = Field(description="The only one that it may be used for.")


class MadeAccessToken(AccessToken):
    """A new access token with its text, which is shown only here."""

    token: str


@router.get("/access-tokens")
def list_access_tokens(
    principal: PrincipalDep,
    services: ServicesDep,
    user: Annotated[str | None, Query(description="Only of this user; for admins.")] = None,
) -> list[AccessToken]:
    """The caller's access tokens; for admins, everybody's. Those that ended are listed for 90 days more."""

    def read(connection: Connection) -> list[AccessToken]:
        owner = principal.user if "admin" not in principal.coordinator_grants else None
        if user is not None:
            owner = _owner(connection, principal, user).id
        names = {row.id: row.name for row in users.list_users(connection)}
        rows = access_tokens.list_access_tokens(connection, owner)
        return [_render(row, names[row.user]) for row in rows]

    return services.database.read(read)


@router.post("/access-tokens", status_code=201)
def create_access_token(
    body: NewAccessToken, principal: PrincipalDep, services: ServicesDep
) -> MadeAccessToken:
    """Creates an access token. One that is created by a token ends no later than that one, and is revoked with it."""
    now = services.clock()

    def create(connection: Connection) -> MadeAccessToken:
        owner = _owner(connection, principal, body.user)
        lifetime = timedelta(days=body.days)
        row, text = access_tokens.create_access_token(
            connection, owner, principal, body.name, body.role, lifetime, now, body.project
        )
        return MadeAccessToken(token=text, **dict(_render(row, owner.name)))

    return services.commit(create)


@router.post("/access-tokens/{token}/revoke")
def revoke_access_token(token: str, principal: PrincipalDep, services: ServicesDep) -> AccessToken:
    """Revokes an access token, and those that it created, from the next request on."""
    now = services.clock()

    def revoke(connection: Connection) -> AccessToken:
        row = access_tokens.revoke_access_token(connection, token, principal, now)
        names = {each.id: each.name for each in users.list_users(connection)}
        return _render(row, names[row.user])

    return services.commit(revoke)


def _owner(connection: Connection, principal: Principal, name: str | None) -> UserRow:
    if name is None and principal.user is None:
        raise Refusal(409, "no_account", "the admin token belongs to no user: name the user")
    wanted = principal.name if name is None else name.strip().lower()
    if wanted != principal.name and "admin" not in principal.coordinator_grants:
        raise Refusal(403, "forbidden", "only admins manage the access tokens of others")
    return users.require_user(connection, wanted)


def _render(row: AccessTokenRow, owner: str) -> AccessToken:
    return AccessToken(**{**vars(row), "user": owner})
