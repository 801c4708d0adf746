"""Operator API: projects, the tenants of a coordinator, and their members."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from coordinator.api.deps import PrincipalDep, RequestBody
from coordinator.context.services import ServicesDep
from coordinator.db import runs
from coordinator.errors import Refusal
from coordinator.identity import projects, users
from coordinator.identity.projects import MemberRole, ProjectRow

router = APIRouter(prefix="/projects", tags=["projects"])


class NewProject(RequestBody):
    name: str = Field(max_length=63, description="Lower-case letters, digits and inner hyphens.")


class ProjectChange(RequestBody):
    archived: bool = Field(description="Nothing changes in an archived project; its members can read it.")


class NewMember(RequestBody):
    role: MemberRole


class Project(BaseModel):
    """A tenant: what it owns can be seen in no other project."""

    name: str
    created_at: datetime
    archived_at: datetime | None


class Member(BaseModel):
    user: str
    role: MemberRole


@router.get("")
def list_projects(principal: PrincipalDep, services: ServicesDep) -> list[Project]:
    """The caller's projects by name; for admins and auditors, all."""
    only = None if principal.is_of_coordinator else principal.user or ""
    return services.database.read(lambda at: [_render(each) for each in projects.list_projects(at, only)])


@router.post("", status_code=201)
def create_project(body: NewProject, services: ServicesDep) -> Project:
    """Creates a project without members."""
    return _render(services.commit(lambda at: projects.create_project(at, body.name, services.clock())))


@router.patch("/{project}")
def change_project(project: str, body: ProjectChange, services: ServicesDep) -> Project:
    """Archives a project, or opens it again. 409 `project_in_use` while a run of it has not ended."""

    def change(connection: Connection) -> Project:
        row = projects.require_project(connection, project)
        live = runs.count_live(connection, project) if body.archived else 0
        if live:
            raise Refusal(
                409,
                "project_in_use",
                f"{live} runs of {row.name} have not ended; cancel them, or wait for them",
            )
        return _render(
            projects.archive_project(connection, project, services.clock() if body.archived else None)
        )

    return services.commit(change)


@router.get("/{project}/members")
def list_members(project: str, services: ServicesDep) -> list[Member]:
    """The members of a project by name. Admins and auditors are members of none."""

    def read(connection: Connection) -> list[Member]:
        projects.require_project(connection, project)
        return [
            Member(user=user, role=role) for user, role in projects.members_of(connection, project).items()
        ]

    return services.database.read(read)


@router.put("/{project}/members/{user}")
def set_member(project: str, user: str, body: NewMember, services: ServicesDep) -> Member:
    """Gives a user a role in a project, from their next request on."""

    def write(connection: Connection) -> Member:
        projects.require_project(connection, project)
        row = users.require_user(connection, user)
        if row.role != "member":
            raise Refusal(409, "has_every_project", f"{row.name} is {row.role} of the whole coordinator")
        projects.set_member(connection, project, row.id, body.role)
        return Member(user=row.name, role=body.role)

    return services.commit(write)


@router.delete("/{project}/members/{user}", status_code=204)
def remove_member(project: str, user: str, services: ServicesDep) -> None:
    """Removes a user from a project, from their next request on."""

    def write(connection: Connection) -> None:
        projects.require_project(connection, project)
        row = users.require_user(connection, user)
        if not projects.remove_member(connection, project, row.id):
            raise Refusal(404, "not_a_member", f"{row.name} is not in the project {project}")

    services.commit(write)


def _render(row: ProjectRow) -> Project:
    return Project(**vars(row))
