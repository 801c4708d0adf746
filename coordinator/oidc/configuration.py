"""Which OpenID provider people sign in at, and which of its groups have which role in which project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import urlsplit

from coordinator.errors import UserError
from coordinator.identity.principals import Role
from coordinator.project_names import DEFAULT_PROJECT, is_project_name
from coordinator.settings import Settings

CALLBACK_PATH = "/sign-in/oidc"
"""Of the console: where the provider sends browsers back to."""


@dataclass(frozen=True)
class MappedRole:
    """The role of users whose claim has this value, in a project; None: in all."""

    value: str
    role: Role
    project: str | None


@dataclass(frozen=True)
class Configuration:
    """A client of an OpenID provider.

    Attributes:
        claim: of the ID token, whose values give roles; dots lead into objects, as in `realm_access.roles`.
        roles: in each project the first one counts whose value a user has. Admins and auditors are so in all projects.
        client_secret: empty for a public client, which PKCE alone protects.
    """

    issuer: str
    client_id: str
    claim: str
    roles: tuple[MappedRole, ...]
    scope: str
    client_secret: str = field(default="", repr=False)

    @property
    def host(self) -> str:
        """What the console calls the provider."""
        return urlsplit(self.issuer).netloc

    @property
    def projects(self) -> frozenset[str]:
        """Those in which the provider decides who is a member."""
        return frozenset(each.project for each in self.roles if each.project is not None)

    def roles_of(self, claims: Mapping[str, Any]) -> dict[str | None, Role]:
        """Project -> the role that these claims give in it; None stands for all projects.

        An address that the provider has not verified gives none.
        """
        if self.claim == "email" and claims.get("email_verified") is not True:
            return {}
        found = _lookup(claims, self.claim)
        values = found if isinstance(found, list) else [found]
        given: dict[str | None, Role] = {}
        for each in self.roles:
            if each.value in values:
                given.setdefault(each.project, each.role)
        return given


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
    return Configuration(
        settings.oidc_issuer,
        settings.oidc_client_id,
        settings.oidc_claim,
        tuple(map(_mapped_role, settings.oidc_roles)),
        settings.oidc_scope,
        settings.oidc_client_secret,
    )


def _mapped_role(text: str) -> MappedRole:
    roles: dict[str, Role] = {role: role for role in get_args(Role)}
    value, _, given = text.rpartition("=")
    name, at, project = given.partition("@")
    role = roles.get(name)
    is_everywhere = role in ("admin", "auditor")
    if role is None or not value or (at and (is_everywhere or not is_project_name(project))):
        raise UserError(
            f"--oidc-role {text}: expected VALUE=ROLE or VALUE=ROLE@PROJECT, with a role of {', '.join(roles)}; admins and auditors are so "
            "in all projects"
        )
    return MappedRole(value, role, None if is_everywhere else project or DEFAULT_PROJECT)


def _lookup(claims: Mapping[str, Any], name: str) -> Any:
    """A claim whose name may lead into objects. A claim with just this name, as a URL may be, wins."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
