"""Projects, the tenants of a coordinator: their members, and what somebody may do in one of them.

A user is an admin or an auditor of the whole coordinator, in every project, or a member of projects with a role in each.
A project is never deleted: an archived one can be read by its members and is not changed any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from sqlalchemy import Connection, delete, insert, select, update

from coordinator.db.tables import columns_of, find_row
from coordinator.errors import Refusal
from coordinator.identity.principals import GRANTS, Principal, Role, coordinator_grants
from coordinator.identity.tables import members, projects, users
from coordinator.project_names import DEFAULT_PROJECT, is_project_name

MemberRole = Literal["viewer", "operator", "data_scientist"]
"""A role in a project. Admins and auditors have theirs in the whole coordinator."""


@dataclass(frozen=True)
class ProjectRow:
    """A row of `projects`."""

    name: str
    created_at: datetime
    archived_at: datetime | None = None


def list_projects(connection: Connection, only: str | None = None) -> list[ProjectRow]:
    """All projects by name; of one user (id) if given."""
    query = select(*columns_of(projects, ProjectRow)).order_by(projects.c.name)
    if only is not None:
        query = query.join(members, members.c.project == projects.c.name).where(members.c.user == only)
    return [ProjectRow(*row) for row in connection.execute(query)]


def open_to(connection: Connection, principal: Principal) -> list[str]:
    """Names of the projects that a principal may choose, without archived ones."""
    if principal.is_limited:
        return [principal.project] if principal.project else []
    only = None if principal.is_of_coordinator else principal.user or ""
    return [each.name for each in list_projects(connection, only) if each.archived_at is None]


def require_project(connection: Connection, name: str) -> ProjectRow:
    """The project of this name.

    Raises:
        Refusal: 404 `unknown_project`.
    """
    row = (
        find_row(connection, ProjectRow, projects, projects.c.name == name) if is_project_name(name) else None
    )
    if row is None:
        raise unknown_project(name)
    return row


def unknown_project(name: str) -> Refusal:
    """What everybody hears of a project that does not exist, or that is not theirs."""
    return Refusal(
        404, "unknown_project", f"there is no project {name[:63]!r}; list yours: fedloop project list"
    )


def create_project(connection: Connection, name: str, now: datetime) -> ProjectRow:
    """A new project without members.

    Raises:
        Refusal: 409 `project_exists`; 422 `malformed`.
    """
    if not is_project_name(name):
        raise Refusal(
            422,
            "malformed",
            f"{name[:63]!r} is no name of a project: expected 1 to 63 lower-case letters, digits and inner hyphens",
        )
    row = ProjectRow(name, now)
    if find_row(connection, ProjectRow, projects, projects.c.name == name) is not None:
        raise Refusal(
            409, "project_exists", f"there is a project {name} already; archived ones keep their name"
        )
    connection.execute(insert(projects).values(vars(row)))
    return row


def archive_project(connection: Connection, name: str, archived_at: datetime | None) -> ProjectRow:
    """Makes a project read-only from the next request on; with None, usable again.

    Raises:
        Refusal: 404 `unknown_project`; 409 `default_project`.
    """
    row = require_project(connection, name)
    if name == DEFAULT_PROJECT and archived_at is not None:
        raise Refusal(409, "default_project", f"the project {name} cannot be archived")
    changed = replace(row, archived_at=archived_at and (row.archived_at or archived_at))
    connection.execute(
        update(projects).where(projects.c.name == name).values(archived_at=changed.archived_at)
    )
    return changed


def set_member(connection: Connection, project: str, user: str, role: MemberRole) -> None:
    """Gives a user (id) this role in a project, from the next request on."""
    remove_member(connection, project, user)
    connection.execute(insert(members).values(project=project, user=user, role=role))


def remove_member(connection: Connection, project: str, user: str) -> bool:
    """Ends a membership; False if there was none."""
    which = (members.c.project == project, members.c.user == user)
    return bool(connection.execute(delete(members).where(*which)).rowcount)


def members_of(connection: Connection, project: str) -> dict[str, MemberRole]:
    """User name -> role, by name."""
    query = (
        select(users.c.name, members.c.role)
        .join_from(members, users)
        .where(members.c.project == project)
        .order_by(users.c.name)
    )
    return {row.name: row.role for row in connection.execute(query)}


def memberships(connection: Connection, user: str) -> dict[str, MemberRole]:
    """Project -> the role of a user (id) in it, by name."""
    query = select(members.c.project, members.c.role).where(members.c.user == user)
    return {row.project: row.role for row in connection.execute(query.order_by(members.c.project))}


def enter(connection: Connection, principal: Principal, wanted: str | None) -> Principal:
    """The principal in the project that the request names, with the permissions that they have there.

    `principal`: as its credentials were found: `grants` are the most that they allow anywhere, `project` the only one that
    they are for, None for any. Without `wanted`: that project, `default`, or the only project of the user.

    Raises:
        Refusal: 404 `unknown_project`: there is none, or it is not theirs.
    """
    limited_to = principal.project
    roles = {} if principal.user is None else memberships(connection, principal.user)
    chosen = wanted or limited_to or _usual(principal, roles)
    if chosen is None:
        return replace(principal, grants=frozenset())
    is_theirs = chosen in roles or principal.is_of_coordinator
    if not is_theirs or limited_to not in (None, chosen):
        raise unknown_project(chosen)
    row = require_project(connection, chosen)
    grants = principal.grants & (principal.coordinator_grants | _grants(roles, chosen))
    return replace(
        principal,
        project=chosen,
        role=_label(principal, roles.get(chosen)),
        grants=grants,
        coordinator_grants=principal.coordinator_grants & (frozenset() if limited_to else principal.grants),
        is_read_only=row.archived_at is not None,
        is_limited=limited_to is not None,
    )


def grants_of(connection: Connection, user: str, role: str, project: str | None) -> frozenset[Role]:
    """The roles whose permissions a user (id) with this role in the coordinator has in a project; with None, in any."""
    roles = memberships(connection, user)
    held = [role for name, role in roles.items() if project in (None, name)]
    return coordinator_grants(role).union(*(GRANTS[each] for each in held))


def _usual(principal: Principal, roles: Mapping[str, MemberRole]) -> str | None:
    if principal.is_of_coordinator or DEFAULT_PROJECT in roles:
        return DEFAULT_PROJECT
    return next(iter(roles)) if len(roles) == 1 else None


def _grants(roles: Mapping[str, MemberRole], project: str) -> frozenset[Role]:
    return GRANTS[roles[project]] if project in roles else frozenset()


def _label(principal: Principal, role: MemberRole | None) -> Role:
    """The role to show: of the token, or of the coordinator, or of the membership."""
    if principal.kind == "access_token" or principal.is_of_coordinator or role is None:
        return principal.role
    return role
