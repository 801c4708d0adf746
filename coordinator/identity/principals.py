"""Who makes a request to the operator API, and what the roles include.

viewer ─► operator ─► data_scientist ─► admin      each includes the one before
viewer ─► auditor ─────────────────────► admin     reads the audit log too, and changes nothing

Viewers, operators and data scientists are so in a project; auditors and admins in the whole coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coordinator.project_names import DEFAULT_PROJECT

Role = Literal["viewer", "auditor", "operator", "data_scientist", "admin"]
Kind = Literal["admin_token", "session", "access_token"]

GRANTS: dict[Role, frozenset[Role]] = {
    "viewer": frozenset({"viewer"}),
    "auditor": frozenset({"viewer", "auditor"}),
    "operator": frozenset({"viewer", "operator"}),
    "data_scientist": frozenset({"viewer", "operator", "data_scientist"}),
    "admin": frozenset({"viewer", "auditor", "operator", "data_scientist", "admin"}),
}
"""Role -> the roles whose permissions it has."""


@dataclass(frozen=True)
class Principal:
    """Who makes a request: the holder of the admin token, or a user by a session or an access token.

    Attributes:
        name: of the user; `admin` for the admin token, which belongs to no user.
        grants: roles whose permissions the request has in its project; an access token has no more than its owner has now.
        user: id of the user; None for the admin token.
        credential: id of the access token; None otherwise.
        project: of the request; None if the user is in none, or in several and names none.
        coordinator_grants: roles whose permissions the request has in the whole coordinator.
        is_read_only: the project is archived.
        is_limited: the credentials are for no other project.
    """

    kind: Kind
    name: str
    role: Role
    grants: frozenset[Role]
    user: str | None = None
    credential: str | None = None
    project: str | None = None
    coordinator_grants: frozenset[Role] = frozenset()
    is_read_only: bool = False
    is_limited: bool = False

    @property
    def is_of_coordinator(self) -> bool:
        """Whether every project is theirs."""
        return bool(self.coordinator_grants)


ADMIN = Principal(
    "admin_token",
    "admin",
    "admin",
    GRANTS["admin"],
    project=DEFAULT_PROJECT,
    coordinator_grants=GRANTS["admin"],
)
"""The holder of the admin token."""


def coordinator_grants(role: str) -> frozenset[Role]:
    """The roles whose permissions a user has in every project. `role`: theirs in the coordinator."""
    return GRANTS["admin"] if role == "admin" else GRANTS["auditor"] if role == "auditor" else frozenset()
