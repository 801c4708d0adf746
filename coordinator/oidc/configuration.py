"""Which OpenID provider people sign in at, and which of its groups have which role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import urlsplit

from coordinator.errors import UserError
from coordinator.identity.principals import Role
from coordinator.settings import Settings

CALLBACK_PATH = "/sign-in/oidc"
"""Of the console: where the provider sends browsers back to."""


@dataclass(frozen=True)
class Configuration:
    """A client of an OpenID provider.

    Attributes:
        claim: of the ID token, whose values give roles; dots lead into objects, as in `realm_access.roles`.
        roles: value of the claim -> role; the first one that a user has counts.
        client_secret: empty for a public client, which PKCE alone protects.
    """

    issuer: str
    client_id: str
    claim: str
    roles: Mapping[str, Role]
    scope: str
    client_secret: str = field(default="", repr=False)

    @property
    def host(self) -> str:
        """What the console calls the provider."""
        return urlsplit(self.issuer).netloc

    def role_of(self, claims: Mapping[str, Any]) -> Role | None:
        """The role that these claims give; None if they give none, as an address that the provider has not verified."""
        if self.claim == "email" and claims.get("email_verified") is not True:
            return None
        found = _lookup(claims, self.claim)
        values = found if isinstance(found, list) else [found]
        return next((role for value, role in self.roles.items() if value in values), None)


def configuration_of(settings: Settings) -> Configuration | None:
    """The provider of these settings; None without one.

    Raises:
        UserError: the settings are incomplete or contradict each other.
    """
    if not settings.oidc_issuer:
        if settings.oidc_client_id or settings.oidc_roles:
            raise UserError("--oidc-issuer is missing: the other --oidc options need it")
        return None
    if not settings.oidc_client_id or not settings.oidc_roles:
        raise UserError(
            "--oidc-issuer needs --oidc-client-id, and at least one --oidc-role: nobody gets in without a role"
        )
    roles: dict[str, Role] = {}
    by_name: dict[str, Role] = {role: role for role in get_args(Role)}
    for text in settings.oidc_roles:
        value, _, role = text.rpartition("=")
        if role not in by_name or not value or value in roles:
            raise UserError(
                f"--oidc-role {text}: expected VALUE=ROLE, each value once, with a role of {', '.join(by_name)}"
            )
        roles[value] = by_name[role]
    return Configuration(
        settings.oidc_issuer,
        settings.oidc_client_id,
        settings.oidc_claim,
        roles,
        settings.oidc_scope,
        settings.oidc_client_secret,
    )


def _lookup(claims: Mapping[str, Any], name: str) -> Any:
    """A claim whose name may lead into objects. A claim with just this name, as a URL may be, wins."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
