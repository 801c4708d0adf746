"""The state of a role of the repository: its expiry, and which of its keys have signed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tuf.api.metadata import Metadata, Root, Targets

from coordinator.releases.roles import NAME_FIELD, ONLINE_ROLES


@dataclass(frozen=True)
class RoleKey:
    """A key that may sign a role. `name`: of an offline key, as its people call it; empty for the coordinator's own."""

    keyid: str
    name: str
    has_signed: bool


@dataclass(frozen=True)
class RoleState:
    """The state of a role. `is_valid`: its delegator's keys have signed it and it has not expired.

    Attributes:
        threshold: how many of `keys` must sign.
    """

    role: str
    version: int
    expires: datetime
    offline: bool
    is_valid: bool
    threshold: int
    keys: tuple[RoleKey, ...]


def role_state(role: str, metadata: Metadata[Any], delegator: Root | Targets, now: datetime) -> RoleState:
    """The state of a role at `now`. `delegator`: it names the role's keys."""
    found = delegator.get_verification_result(role, metadata.signed_bytes, metadata.signatures)
    keys = [
        RoleKey(keyid, str(key.unrecognized_fields.get(NAME_FIELD, "")), has_signed)
        for has_signed, some in ((True, found.signed), (False, found.unsigned))
        for keyid, key in some.items()
    ]
    return RoleState(
        role,
        metadata.signed.version,
        metadata.signed.expires,
        role not in ONLINE_ROLES,
        found.verified and not metadata.signed.is_expired(now),
        found.threshold,
        tuple(sorted(keys, key=lambda each: (each.name, each.keyid))),
    )
