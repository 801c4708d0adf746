"""Access tokens: a user's credentials for commands and programs, each with a name, a role and an end.

A token has at most the role of its owner, also when that is lowered later. A token that another token created ends no later
than that one and is revoked with it, so a stolen token cannot outlive its revocation.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select, update

from coordinator.db.tables import columns_of, find_row
from coordinator.errors import Refusal
from coordinator.identity.principals import GRANTS, Principal, Role, coordinator_grants
from coordinator.identity.projects import grants_of, require_project, unknown_project
from coordinator.identity.sessions import hash_of
from coordinator.identity.tables import access_tokens, users
from coordinator.identity.users import UserRow

PREFIX = "fla_"
"""Of every token, so that people and scanners recognize one."""
MAX_LIVE = 100
"""Of one user."""
MAX_DAYS = 366
_KEPT = timedelta(days=90)
"""After their end, so that lists show them."""


@dataclass(frozen=True)
class AccessTokenRow:
    """A row of `access_tokens`. `user` and `parent` are ids; `parent` is the token that created it.

    `project`: the only one that it may be used for; None: any of its owner.
    """

    id: str
    user: str
    name: str
    role: Role
    secret_sha256: str
    parent: str | None
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None
    project: str | None = None

    def is_live(self, now: datetime) -> bool:
        return self.revoked_at is None and now < self.expires_at


def create_access_token(
    connection: Connection,
    owner: UserRow,
    by: Principal,
    name: str,
    role: Role | None,
    lifetime: timedelta,
    now: datetime,
    project: str | None = None,
) -> tuple[AccessTokenRow, str]:
    """Creates a token of `owner`; returns it and its text, which is not stored.

    `role`: by default the owner's highest. `project`: the only one that it may be used for; None: any of the owner's, with
    the lesser of the two roles in each.

    Raises:
        Refusal: 403 `forbidden`: the role is above the owner's, or above that of the creating token, or that one is for
            another project; 404 `unknown_project`; 409 `too_many_tokens`; 422 `malformed`.
    """
    if not name.strip() or not name.isprintable():
        raise Refusal(422, "malformed", f"the token's name is {name[:40]!r}, expected printable characters")
    parent = _parent(connection, by)
    if parent is not None and parent.project is not None:
        project = project or parent.project
    if project is not None:
        require_project(connection, project)
    role = _permitted_role(connection, owner, parent, role, project)
    _drop_ended(connection, now - _KEPT)
    live = [each for each in list_access_tokens(connection, owner.id) if each.is_live(now)]
    if len(live) >= MAX_LIVE:
        raise Refusal(
            409, "too_many_tokens", f"{owner.name} has {len(live)} tokens, the maximum; revoke some before"
        )
    expires_at = now + lifetime if parent is None else min(now + lifetime, parent.expires_at)
    text = PREFIX + secrets.token_urlsafe(32)
    row = AccessTokenRow(
        str(uuid.uuid4()),
        owner.id,
        name.strip(),
        role,
        hash_of(text),
        by.credential,
        now,
        expires_at,
        project=project,
    )
    connection.execute(insert(access_tokens).values(asdict(row)))
    return row, text


def _parent(connection: Connection, by: Principal) -> AccessTokenRow | None:
    """The token that creates another one; None for a session and the admin token."""
    if by.credential is None:
        return None
    parent = find_row(connection, AccessTokenRow, access_tokens, access_tokens.c.id == by.credential)
    assert parent is not None  # the request came with it
    return parent


def _permitted_role(
    connection: Connection,
    owner: UserRow,
    parent: AccessTokenRow | None,
    role: Role | None,
    project: str | None,
) -> Role:
    """The role of a new token, if its owner and the token that creates it may give it."""
    held = grants_of(connection, owner.id, owner.role, project)
    if project is not None and not held:
        raise unknown_project(project)
    highest = max(
        (each for each in GRANTS if GRANTS[each] <= held), key=lambda each: len(GRANTS[each]), default=None
    )
    role = role or highest or "viewer"
    may_give = (
        held | GRANTS["viewer"]
    )  # a viewer's token opens nothing but the account to who is in no project
    if parent is not None:
        may_give &= GRANTS[parent.role]
    if not GRANTS[role] <= may_give:
        raise Refusal(
            403,
            "forbidden",
            f"a token has at most the role of its owner: {owner.name} has {highest or 'none'}, not {role}",
        )
    if parent is not None and parent.project not in (None, project):
        raise Refusal(403, "forbidden", f"this token is for the project {parent.project} only")
    return role


def find_access_token(
    connection: Connection, text: str, now: datetime
) -> tuple[Principal, datetime | None] | None:
    """Whose token has this text, and when it was last used; None if it has ended or its owner is disabled.

    `projects.enter` follows.
    """
    token = access_tokens.c
    row = connection.execute(
        select(
            token.id,
            token.role,
            token.last_used_at,
            token.project,
            users.c.name,
            users.c.id.label("owner"),
            users.c.role.label("owners"),
        )
        .join_from(access_tokens, users)
        .where(
            token.secret_sha256 == hash_of(text),
            token.revoked_at.is_(None),
            token.expires_at > now,
            users.c.disabled_at.is_(None),
        )
    ).one_or_none()
    if row is None:
        return None
    principal = Principal(
        "access_token",
        row.name,
        row.role,
        GRANTS[row.role],
        row.owner,
        row.id,
        row.project,
        coordinator_grants(row.owners),
    )
    return principal, row.last_used_at


def touch_access_token(connection: Connection, token: str, now: datetime) -> None:
    """Records a use. `token`: id."""
    connection.execute(update(access_tokens).where(access_tokens.c.id == token).values(last_used_at=now))


def list_access_tokens(connection: Connection, user: str | None) -> list[AccessTokenRow]:
    """The tokens of a user (id), or of all, oldest first; those that ended, for 90 days more."""
    query = select(*columns_of(access_tokens, AccessTokenRow))
    if user is not None:
        query = query.where(access_tokens.c.user == user)
    rows = connection.execute(query.order_by(access_tokens.c.created_at, access_tokens.c.id))
    return [AccessTokenRow(*row) for row in rows]


def revoke_access_token(connection: Connection, token: str, by: Principal, now: datetime) -> AccessTokenRow:
    """Revokes a token, and those that it created, from the next request on. Only admins revoke tokens of others.

    Raises:
        Refusal: 404 `unknown_access_token`, also for another user's.
    """
    row = find_row(connection, AccessTokenRow, access_tokens, access_tokens.c.id == token)
    if row is None or not (row.user == by.user or "admin" in by.coordinator_grants):
        raise Refusal(
            404,
            "unknown_access_token",
            f"there is no access token {token[:40]!r}; list them: fedloop access-token list",
        )
    _revoke(connection, [row.id], now)
    return replace(row, revoked_at=row.revoked_at or now)


def revoke_all_access_tokens(connection: Connection, user: str, now: datetime) -> None:
    """Revokes the tokens of a user (id), and those that they created."""
    ids = connection.execute(select(access_tokens.c.id).where(access_tokens.c.user == user)).scalars().all()
    _revoke(connection, ids, now)


def _revoke(connection: Connection, wave: Sequence[str], now: datetime) -> None:
    while wave:
        connection.execute(
            update(access_tokens)
            .where(access_tokens.c.id.in_(wave), access_tokens.c.revoked_at.is_(None))
            .values(revoked_at=now)
        )
        wave = (
            connection.execute(select(access_tokens.c.id).where(access_tokens.c.parent.in_(wave)))
            .scalars()
            .all()
        )


def _drop_ended(connection: Connection, before: datetime) -> None:
    """Deletes tokens that ended before this; a token's own tokens ended no later than it did."""
    ended = (
        connection.execute(select(access_tokens.c.id).where(access_tokens.c.expires_at < before))
        .scalars()
        .all()
    )
    if ended:
        connection.execute(update(access_tokens).where(access_tokens.c.parent.in_(ended)).values(parent=None))
        connection.execute(delete(access_tokens).where(access_tokens.c.id.in_(ended)))
