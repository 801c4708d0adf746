"""Sessions of browsers. The browser holds a random secret in a cookie, the database its hash.

A session ends at sign-out, after an hour without a request, twelve hours after it began, with a change of the password, and
when its user is disabled. A sign-in always begins a new one: a secret that somebody planted in the browser is worth nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, or_, select, update

from coordinator.identity.principals import GRANTS, Principal, Role, coordinator_grants
from coordinator.identity.tables import sessions, users

IDLE = timedelta(hours=1)
LIFETIME = timedelta(hours=12)
TOUCH = timedelta(minutes=1)
"""Uses within this time of the recorded one are not written."""


def begin_session(connection: Connection, user: str, now: datetime) -> tuple[str, datetime]:
    """Begins a session of a user (id); returns its secret and its end. Drops sessions that have ended."""
    connection.execute(
        delete(sessions).where(or_(sessions.c.expires_at <= now, sessions.c.last_used_at <= now - IDLE))
    )
    secret = secrets.token_urlsafe(32)
    expires_at = now + LIFETIME
    connection.execute(
        insert(sessions).values(
            secret_sha256=hash_of(secret), user=user, created_at=now, last_used_at=now, expires_at=expires_at
        )
    )
    return secret, expires_at


def end_session(connection: Connection, secret: str) -> None:
    connection.execute(delete(sessions).where(sessions.c.secret_sha256 == hash_of(secret)))


def find_session(connection: Connection, secret: str, now: datetime) -> tuple[Principal, datetime] | None:
    """Whose session this secret is, and when it was last used; None if it has ended. `projects.enter` follows."""
    row = connection.execute(
        select(users.c.id, users.c.name, users.c.role, sessions.c.last_used_at)
        .join_from(sessions, users)
        .where(
            sessions.c.secret_sha256 == hash_of(secret),
            sessions.c.expires_at > now,
            sessions.c.last_used_at > now - IDLE,
            users.c.disabled_at.is_(None),
        )
    ).one_or_none()
    if row is None:
        return None
    return session_principal(row.id, row.name, row.role), row.last_used_at


def session_principal(user: str, name: str, role: str) -> Principal:
    """A user (id) by a session, before `projects.enter`. `role`: theirs in the coordinator."""
    held = coordinator_grants(role)
    shown: Role = "admin" if "admin" in held else "auditor" if held else "viewer"
    return Principal("session", name, shown, GRANTS["admin"], user, coordinator_grants=held)


def end_of_session(connection: Connection, secret: str) -> datetime:
    """When a session that goes on ends at the latest."""
    query = select(sessions.c.expires_at).where(sessions.c.secret_sha256 == hash_of(secret))
    expires_at: datetime = connection.execute(query).scalar_one()
    return expires_at


def touch_session(connection: Connection, secret: str, now: datetime) -> None:
    """Records a use."""
    connection.execute(
        update(sessions).where(sessions.c.secret_sha256 == hash_of(secret)).values(last_used_at=now)
    )


def csrf_token(secret: str) -> str:
    """What a page of ours sends with every change, in the header `X-CSRF-Token`.

    It follows from the session's secret, which scripts cannot read, and reveals nothing about it.
    """
    return hmac.new(secret.encode(), b"fedloop csrf", hashlib.sha256).hexdigest()


def hash_of(secret: str) -> str:
    """SHA-256 of a secret of 256 random bits, which needs no slow hash."""
    return hashlib.sha256(secret.encode()).hexdigest()
