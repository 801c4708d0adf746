"""Operator API: users, for admins."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from coordinator.api.deps import RequestBody, ServicesDep
from coordinator.api.session import Password, UserName
from coordinator.context.services import Services
from coordinator.identity import setup_links, users
from coordinator.identity.passwords import hash_password, require_strong
from coordinator.identity.principals import Role
from coordinator.identity.users import UserRow, user_name
from coordinator.project_names import DEFAULT_PROJECT

router = APIRouter(tags=["users"])


class NewUser(RequestBody):
    name: UserName
    role: Role
    password: Password


class UserChange(RequestBody):
    """Keys that are missing stay as they are."""

    role: Role | None = None
    disabled: bool | None = None


class NewPassword(RequestBody):
    password: Password


class User(BaseModel):
    name: str
    role: Role | None = Field(
        description="In the whole coordinator, or in the project of the request; null for others."
    )
    disabled: bool
    created_at: datetime
    password_changed_at: datetime
    disabled_at: datetime | None = Field(description="From then on every request of the user is refused.")


@router.get("/users")
def list_users(services: ServicesDep) -> list[User]:
    """All users in order of their names, disabled ones too."""
    return services.database.read(
        lambda at: [_render(at, row, services.project) for row in users.list_users(at)]
    )


@router.post("/users", status_code=201)
def add_user(body: NewUser, services: ServicesDep) -> User:
    """Creates an account. Roles other than admin and auditor are in the project of the request."""
    name, now = user_name(body.name), services.clock()
    password_hash = _strong_hash(services, body.password, name)
    project = services.project or DEFAULT_PROJECT

    def add(connection: Connection) -> User:
        row = users.add_user(connection, name, body.role, password_hash, now, project)
        return _render(connection, row, project)

    added = services.commit(add)
    setup_links.write_link(services.settings.home, None)  # it ended with the first user
    return added


@router.patch("/users/{user}")
def change_user(user: str, body: UserChange, services: ServicesDep) -> User:
    """Changes a role, disables or enables a user, from their next request on.

    Roles other than admin and auditor are in the project of the request.
    """
    now, project = services.clock(), services.project or DEFAULT_PROJECT

    def change(connection: Connection) -> User:
        row = users.change_user(
            connection, user, now, role=body.role, disabled=body.disabled, project=project
        )
        return _render(connection, row, project)

    return services.commit(change)


@router.put("/users/{user}/password", status_code=204)
def reset_password(user: str, body: NewPassword, services: ServicesDep) -> None:
    """Replaces the password of a user, whose sessions end. Their access tokens stay."""
    row = services.database.read(lambda at: users.require_user(at, user))
    password_hash = _strong_hash(services, body.password, row.name)
    now = services.clock()
    services.commit(lambda at: users.set_password(at, row.id, password_hash, now))


def _strong_hash(services: Services, password: Password, name: str) -> str:
    require_strong(password.get_secret_value(), name)
    return services.password_threads.submit(hash_password, password.get_secret_value()).result()


def _render(connection: Connection, row: UserRow, project: str | None) -> User:
    role = users.role_in(connection, row, project)
    return User(**{**vars(row), "role": role, "disabled": row.disabled_at is not None})
