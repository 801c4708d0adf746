"""Users who sign in at an OpenID provider, known by issuer and subject: names and addresses change hands, subjects do not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime

from sqlalchemy import Connection, insert, select

from coordinator.errors import Refusal
from coordinator.identity.passwords import NO_PASSWORD
from coordinator.identity.principals import Role
from coordinator.identity.tables import external_accounts, users
from coordinator.identity.users import UserRow, add_user, change_user, find_user, user_name


def account_of(
    connection: Connection, issuer: str, subject: str, names: Iterable[object], role: Role, now: datetime
) -> UserRow:
    """The user with this subject, with the role that the provider gives now; a new one at the first sign-in.

    `names`: what a new user may be called, the preferred one first; one that another user has is never taken over.
    """
    known = external_accounts.c
    name = connection.execute(
        select(users.c.name)
        .join_from(external_accounts, users)
        .where(known.issuer == issuer, known.subject == subject)
    ).scalar_one_or_none()
    if name is not None:
        return change_user(connection, name, now, role=role)
    row = add_user(connection, _free_name(connection, issuer, subject, names), role, NO_PASSWORD, now)
    connection.execute(
        insert(external_accounts).values(issuer=issuer, subject=subject, user=row.id, created_at=now)
    )
    return row


def _free_name(connection: Connection, issuer: str, subject: str, names: Iterable[object]) -> str:
    for each in names:
        with suppress(Refusal):
            name = user_name(each) if isinstance(each, str) else ""
            if name and find_user(connection, name) is None:
                return name
    return f"oidc-{hashlib.sha256(f'{issuer} {subject}'.encode()).hexdigest()[:16]}"
