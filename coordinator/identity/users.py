"""Users: an account is a name, a role and a password. Users are disabled and never deleted, so that what they did keeps a name."""

from __future__ import annotations

import re
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Literal

from sqlalchemy import Connection, delete, func, insert, select, update

from coordinator.db.tables import columns_of, find_row
from coordinator.errors import Refusal
from coordinator.identity.principals import Role
from coordinator.identity.projects import MemberRole, memberships, set_member
from coordinator.identity.tables import sessions, users
from coordinator.project_names import DEFAULT_PROJECT

_NAME = re.compile(r"[a-z0-9][a-z0-9._@+-]{0,63}")


UserRole = Literal["admin", "auditor", "member"]
"""A role in the whole coordinator. A `member` has one in each of their projects (`coordinator.identity.projects`)."""


@dataclass(frozen=True)
class UserRow:
    """A row of `users`. A user with `disabled_at` is refused everywhere."""

    id: str
    name: str
    role: UserRole
    password_hash: str
    created_at: datetime
    password_changed_at: datetime
    disabled_at: datetime | None = None


def user_name(text: str) -> str:
    """A user's name in the one form in which it is stored: lower case.

    Raises:
        Refusal: 422 `malformed`.
    """
    name = text.strip().lower()
    if not _NAME.fullmatch(name):
        raise Refusal(
            422,
            "malformed",
            f"{text[:40]!r} is not a name: expected 1 to 64 letters, digits and . _ @ + -, beginning with a letter or digit",
        )
    return name


def add_user(
    connection: Connection,
    name: str,
    role: Role,
    password_hash: str,
    now: datetime,
    project: str = DEFAULT_PROJECT,
) -> UserRow:
    """Creates an account. Admins and auditors are so in every project, others in `project`.

    Raises:
        Refusal: 409 `user_exists`; 422 `malformed`.
    """
    user_role, member_role = _split(role)
    row = UserRow(str(uuid.uuid4()), user_name(name), user_role, password_hash, now, now)
    if find_user(connection, row.name) is not None:
        raise Refusal(
            409, "user_exists", f"there is a user {row.name} already; disabled users keep their name"
        )
    connection.execute(insert(users).values(asdict(row)))
    if member_role is not None:
        set_member(connection, project, row.id, member_role)
    return row


def find_user(connection: Connection, name: str) -> UserRow | None:
    """The user with this name, in lower case; None also for text that no name can be."""
    return find_row(connection, UserRow, users, users.c.name == name) if _NAME.fullmatch(name) else None


def require_user(connection: Connection, name: str) -> UserRow:
    """The user with this name. Raises: Refusal: 404 `unknown_user`."""
    row = find_user(connection, name.strip().lower())
    if row is None:
        raise Refusal(404, "unknown_user", f"there is no user {name[:40]!r}; list them: fedloop user list")
    return row


def list_users(connection: Connection) -> list[UserRow]:
    """All users in order of their names."""
    rows = connection.execute(select(*columns_of(users, UserRow)).order_by(users.c.name))
    return [UserRow(*row) for row in rows]


def count_users(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(users)).scalar_one())


def change_user(
    connection: Connection,
    name: str,
    now: datetime,
    *,
    role: Role | None = None,
    disabled: bool | None = None,
    project: str = DEFAULT_PROJECT,
) -> UserRow:
    """Changes what is given, from the next request on. Disabling ends the user's sessions.

    A role other than admin and auditor is one in `project`; the user's roles in other projects stay.

    Raises:
        Refusal: 404 `unknown_user`.
    """
    row = require_user(connection, name)
    changed = row
    if role is not None:
        user_role, member_role = _split(role)
        changed = replace(row, role=user_role)
        if member_role is not None:
            set_member(connection, project, row.id, member_role)
    if disabled is not None:
        changed = replace(changed, disabled_at=(row.disabled_at or now) if disabled else None)
    connection.execute(
        update(users).where(users.c.id == row.id).values(role=changed.role, disabled_at=changed.disabled_at)
    )
    if changed.disabled_at is not None:
        end_sessions(connection, row.id)
    return changed


def set_password(connection: Connection, user: str, password_hash: str, now: datetime) -> None:
    """Replaces a user's password and ends their sessions. `user`: id."""
    connection.execute(
        update(users).where(users.c.id == user).values(password_hash=password_hash, password_changed_at=now)
    )
    end_sessions(connection, user)


def role_in(connection: Connection, user: UserRow, project: str | None) -> Role | None:
    """The role of a user in the coordinator, else in this project; None if they have none."""
    if user.role != "member":
        return user.role
    return memberships(connection, user.id).get(project or "")


def _split(role: Role) -> tuple[UserRole, MemberRole | None]:
    """A role as one in the coordinator and one in a project."""
    return (role, None) if role == "admin" or role == "auditor" else ("member", role)


def end_sessions(connection: Connection, user: str) -> int:
    """Ends all sessions of a user; returns their number."""
    return connection.execute(delete(sessions).where(sessions.c.user == user)).rowcount
