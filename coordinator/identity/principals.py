"""Who makes a request to the operator API, and what the roles include.

viewer ─► operator ─► data_scientist ─► admin      each includes the one before
viewer ─► auditor ─────────────────────► admin     reads the audit log too, and changes nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        grants: roles whose permissions the request has; an access token has no more than its owner has now.
        user: id of the user; None for the admin token.
        credential: id of the access token; None otherwise.
    """

    kind: Kind
    name: str
    role: Role
    grants: frozenset[Role]
    user: str | None = None
    credential: str | None = None


ADMIN = Principal("admin_token", "admin", "admin", GRANTS["admin"])
"""The holder of the admin token."""
