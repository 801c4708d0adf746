"""The minimum role of each route of the operator API. Unlisted routes are refused and prevent startup.

Viewers read states and figures. Operators run the fleet: devices, enrolment, rollouts, publishing what the offline keys have
signed, and stopping a run. Data scientists start runs and jobs, and read and register the params of models. Admins manage users and
keys. Auditors read what viewers read, and the audit log.

The role is the one in the project of the request, unless the route is of the user (any will do) or of the whole coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute

from coordinator.context.services import services_of
from coordinator.errors import Refusal
from coordinator.identity.principals import Principal, Role
from coordinator.project_names import DEFAULT_PROJECT

REQUIRED_ROLES: dict[tuple[str, str], Role] = {
    ("GET", "/devices"): "viewer",
    ("GET", "/devices/{device}"): "viewer",
    ("GET", "/devices/{device}/why"): "viewer",
    ("GET", "/devices/{device}/events"): "viewer",
    ("GET", "/devices/{device}/tasks"): "viewer",
    ("GET", "/devices/{device}/privacy"): "viewer",
    ("POST", "/devices/{device}/approve"): "operator",
    ("POST", "/devices/{device}/group"): "operator",
    ("POST", "/devices/{device}/revoke"): "operator",
    ("GET", "/tokens"): "operator",
    ("POST", "/tokens"): "operator",
    ("POST", "/tokens/{token}/withdraw"): "operator",
    ("POST", "/serials"): "operator",
    ("GET", "/experiments/schema"): "viewer",
    ("POST", "/experiments/check"): "data_scientist",
    ("POST", "/experiments/privacy"): "data_scientist",
    ("GET", "/runs"): "viewer",
    ("POST", "/runs"): "data_scientist",
    ("GET", "/runs/{run}"): "viewer",
    ("GET", "/runs/{run}/devices"): "viewer",
    ("GET", "/runs/{run}/rounds"): "viewer",
    ("GET", "/runs/{run}/report"): "viewer",
    ("GET", "/privacy/runs"): "viewer",
    ("GET", "/runs/{run}/privacy"): "viewer",
    ("GET", "/runs/{run}/privacy/devices"): "viewer",
    ("GET", "/runs/{run}/events"): "viewer",
    ("GET", "/runs/{run}/model"): "data_scientist",
    ("POST", "/runs/{run}/cancel"): "operator",
    ("POST", "/runs/{run}/resume"): "data_scientist",
    ("GET", "/runs/{run}/open-round"): "viewer",
    ("GET", "/jobs"): "viewer",
    ("POST", "/jobs"): "data_scientist",
    ("GET", "/jobs/{job}"): "viewer",
    ("DELETE", "/jobs/{job}"): "data_scientist",
    ("GET", "/jobs/{job}/events"): "viewer",
    ("GET", "/jobs/{job}/curve"): "viewer",
    ("GET", "/jobs/{job}/report"): "viewer",
    ("GET", "/jobs/{job}/files/{name}"): "data_scientist",
    ("POST", "/jobs/{job}/cancel"): "data_scientist",
    ("POST", "/jobs/{job}/resume"): "data_scientist",
    ("POST", "/statistics"): "data_scientist",
    ("GET", "/statistics/{run}"): "viewer",
    ("GET", "/statistics/{run}/schema"): "viewer",
    ("GET", "/models"): "viewer",
    ("GET", "/models/{name}"): "viewer",
    ("GET", "/models/{name}/versions"): "viewer",
    ("POST", "/models/{name}/versions"): "data_scientist",
    ("GET", "/models/{name}/moves"): "viewer",
    ("PUT", "/models/{name}/aliases/{alias}"): "data_scientist",
    ("DELETE", "/models/{name}/aliases/{alias}"): "data_scientist",
    ("GET", "/model-files/{sha256}"): "data_scientist",
    ("PUT", "/model-files/{sha256}"): "data_scientist",
    ("GET", "/versions/{version}"): "viewer",
    ("GET", "/versions/{version}/lineage"): "viewer",
    ("GET", "/versions/{version}/files/{path}"): "data_scientist",
    ("PUT", "/versions/{version}/metrics/{stage}"): "data_scientist",
    ("GET", "/releases"): "viewer",
    ("POST", "/releases"): "operator",
    ("GET", "/releases/status"): "viewer",
    ("GET", "/releases/metadata"): "viewer",
    ("GET", "/releases/online-keys"): "viewer",
    ("POST", "/releases/online-keys/rotate"): "admin",
    ("GET", "/releases/files/{sha256}"): "operator",
    ("PUT", "/releases/files/{sha256}"): "operator",
    ("GET", "/rollouts"): "viewer",
    ("POST", "/rollouts"): "operator",
    ("GET", "/rollouts/{rollout}"): "viewer",
    ("GET", "/rollouts/{rollout}/devices"): "viewer",
    ("POST", "/rollouts/{rollout}/pause"): "operator",
    ("POST", "/rollouts/{rollout}/resume"): "operator",
    ("POST", "/rollouts/{rollout}/abort"): "operator",
    ("POST", "/rollouts/{rollout}/force"): "operator",
    ("GET", "/session"): "viewer",
    ("DELETE", "/session"): "viewer",
    ("POST", "/session/end-all"): "viewer",
    ("PUT", "/session/password"): "viewer",
    ("GET", "/access-tokens"): "viewer",
    ("POST", "/access-tokens"): "viewer",
    ("POST", "/access-tokens/{token}/revoke"): "viewer",
    ("GET", "/users"): "admin",
    ("POST", "/users"): "admin",
    ("PATCH", "/users/{user}"): "admin",
    ("PUT", "/users/{user}/password"): "admin",
    ("GET", "/projects"): "viewer",
    ("POST", "/projects"): "admin",
    ("PATCH", "/projects/{project}"): "admin",
    ("GET", "/projects/{project}/members"): "admin",
    ("PUT", "/projects/{project}/members/{user}"): "admin",
    ("DELETE", "/projects/{project}/members/{user}"): "admin",
    ("GET", "/oidc"): "admin",
    ("GET", "/events"): "viewer",
    ("GET", "/system"): "viewer",
    ("GET", "/audit"): "auditor",
    ("GET", "/audit/entries"): "auditor",
    ("GET", "/audit/verify"): "auditor",
    ("GET", "/audit/head"): "auditor",
}
"""Method and path below `/api/v1` -> role. Every user may manage their own session, password and access tokens."""

OF_USER = frozenset(
    {
        ("GET", "/session"),
        ("DELETE", "/session"),
        ("POST", "/session/end-all"),
        ("PUT", "/session/password"),
        ("GET", "/access-tokens"),
        ("POST", "/access-tokens"),
        ("POST", "/access-tokens/{token}/revoke"),
        ("GET", "/projects"),
    }
)
"""Routes of every user, whatever their projects."""

OF_COORDINATOR = frozenset(
    key
    for key, least in REQUIRED_ROLES.items()
    if least in ("admin", "auditor")
    or key[1] in ("/releases", "/releases/metadata", "/releases/files/{sha256}")
    if key != ("GET", "/releases")
)
"""Routes of the whole coordinator: their role is needed in it, or for signed releases in the project `default`.

Every other route serves one project: its services see what that owns.
"""

OPEN = frozenset(
    {
        ("POST", "/session"),
        ("POST", "/setup"),
        ("GET", "/session/methods"),
        ("POST", "/session/oidc/begin"),
        ("POST", "/session/oidc"),
    }
)
"""Routes that need no credentials: they sign in, with a password, the secret of the setup link or an OpenID provider."""


def route_key(request: Request) -> tuple[str, str]:
    """Method and path template of the route that serves a request."""
    return request.method, request.scope["route"].path_format


def require_permission_of(principal: Principal, route: tuple[str, str]) -> None:
    """Requires that the principal's role includes the one that the route needs, where it needs it.

    Raises:
        Refusal: 403 `forbidden`, `no_project`.
    """
    method, path = route
    needed = REQUIRED_ROLES.get(route)
    if needed is None:
        raise Refusal(403, "forbidden", f"no role may use {method} {path}")
    if route in OF_USER:
        return
    if route in OF_COORDINATOR:
        grants, where = principal.coordinator_grants, " in the whole coordinator"
        if path.startswith("/releases"):
            where = f" in the project {DEFAULT_PROJECT}"
            grants |= principal.grants if principal.project == DEFAULT_PROJECT else frozenset()
    elif principal.project is None:
        raise Refusal(
            403, "no_project", f"{principal.name} is in no project, or in several; name one: --project"
        )
    else:
        grants, where = principal.grants, ""
    if needed not in grants:
        raise Refusal(
            403,
            "forbidden",
            f"{method} {path} needs the role {needed}{where}; {principal.name} has {principal.role}",
        )


def require_limited(guarded: Iterable[APIRouter]) -> None:
    """Requires that no route of one project asks for the services of the process, which see all projects.

    Raises:
        RuntimeError: naming those that do.
    """
    seeing_all = [
        f"{sorted(route.methods or ())} {route.path_format}"
        for router in guarded
        for route in router.routes
        if isinstance(route, APIRoute)
        and any(each.call is services_of for each in route.dependant.dependencies)
        and not {(method, route.path_format) for method in route.methods or ()} <= OF_USER | OF_COORDINATOR
    ]
    if seeing_all:
        raise RuntimeError(f"these routes must use ServicesDep of coordinator.api.deps: {seeing_all}")


def require_complete(guarded: Iterable[APIRouter], unguarded: Iterable[APIRouter]) -> None:
    """Requires that each route of the guarded routers is listed, that the others are exactly `OPEN`.

    Raises:
        RuntimeError: naming those that differ.
    """
    for routers, listed in ((guarded, set(REQUIRED_ROLES)), (unguarded, set(OPEN))):
        served = {
            (method, route.path_format)
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }
        if served != listed:
            raise RuntimeError(f"permissions differ from routes: {sorted(served ^ listed)}")
