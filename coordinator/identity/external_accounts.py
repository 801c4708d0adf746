"""Users who sign in at an OpenID provider, known by issuer and subject: names and addresses change hands, subjects do not."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, insert, select, update

from coordinator.errors import Refusal
from coordinator.identity.passwords import NO_PASSWORD
from coordinator.identity.principals import Role
from coordinator.identity.projects import list_projects, remove_member
from coordinator.identity.tables import external_accounts, users
from coordinator.identity.users import UserRow, add_user, change_user, find_user, require_user, user_name
from coordinator.project_names import DEFAULT_PROJECT


@dataclass(frozen=True)
class Subject:
    """Somebody at a provider. `names`: what a new user may be called, the preferred one first."""

    issuer: str
    id: str
    names: tuple[object, ...]


def account_of(
    connection: Connection,
    subject: Subject,
    roles: Mapping[str | None, Role],
    projects: Collection[str],
    now: datetime,
) -> UserRow | None:
    """The user with this subject, with the roles that the provider gives now; a new one at the first sign-in. None without a role.

    A name that another user has is never taken over.

    Args:
        roles: project -> role in it; None: the role in all of them. Projects that do not exist are left out.
        projects: those in which the provider decides: memberships in them that it does not give end.
    """
    existing = {each.name for each in list_projects(connection)}
    # The role in all projects comes last: it is the one that decides.
    given = [(project, role) for project, role in roles.items() if project in existing]
    given += [(DEFAULT_PROJECT, role) for project, role in roles.items() if project is None]
    name = _known_name(connection, subject)
    if name is None and given:
        project, role = given[0]
        name = _free_name(connection, subject)
        row = add_user(connection, name, role, NO_PASSWORD, now, project)
        known = {"issuer": subject.issuer, "subject": subject.id}
        connection.execute(insert(external_accounts).values(**known, user=row.id, created_at=now))
    if name is None:
        return None
    user = require_user(connection, name)
    connection.execute(update(users).where(users.c.id == user.id).values(role="member"))
    for project in set(projects) - roles.keys():
        remove_member(connection, project, user.id)
    for project, role in given:
        user = change_user(connection, name, now, role=role, project=project)
    return user if given else None


def _known_name(connection: Connection, subject: Subject) -> str | None:
    known = external_accounts.c
    name: str | None = connection.execute(
        select(users.c.name)
        .join_from(external_accounts, users)
        .where(known.issuer == subject.issuer, known.subject == subject.id)
    ).scalar_one_or_none()
    return name


def _free_name(connection: Connection, subject: Subject) -> str:
    for each in subject.names:
        with suppress(Refusal):
            name = user_name(each) if isinstance(each, str) else ""
            if name and find_user(connection, name) is None:
                return name
    return f"oidc-{hashlib.sha256(f'{subject.issuer} {subject.id}'.encode()).hexdigest()[:16]}"
