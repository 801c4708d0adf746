"""Which role may use which route: everything is refused unless the table says otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import APIRouter, FastAPI

from coordinator.api.permissions import OPEN, REQUIRED_ROLES, require_complete, require_permission_of
from coordinator.context.services import Services
from coordinator.errors import Refusal
from coordinator.identity.principals import ADMIN, GRANTS, Principal, Role
from tests.support.long import extended
from tests.support.people import add_user, anyone, app_of, bearer, browser, cheap_passwords, code_of, token_of
from tests.support.services import services_in

__all__ = ["cheap_passwords"]

OWN = {
    ("DELETE", "/session"),
    ("POST", "/session/end-all"),
    ("PUT", "/session/password"),
    ("POST", "/access-tokens"),
    ("POST", "/access-tokens/{token}/revoke"),
}
"""Changes of the caller's own account."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with services_in(tmp_path_factory.mktemp("coordinator") / "home") as opened:
        opened.signals.close()  # streams of events end at once
        yield opened


@pytest.fixture(scope="module")
def app(services: Services) -> FastAPI:
    return app_of(services)


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of every operation of the OpenAPI document."""
    paths = app.openapi()["paths"]
    return [(method.upper(), path) for path, operations in paths.items() for method in operations]


def test_every_route_needs_credentials_but_those_to_sign_in(app: FastAPI) -> None:
    stranger = anyone(app)
    assert stranger.get("/api/v1/session/methods").status_code == 200
    for method, path in routes_of(app):
        if path == "/api/v1/session/methods":
            continue
        refused = code_of(stranger.request(method, path))
        expected = (422, "malformed") if (method, path.removeprefix("/api/v1")) in OPEN else (401, "no_token")
        assert refused == expected, (method, path)


@pytest.mark.parametrize(
    ("role", "way"),
    [
        *((role, "access_token") for role in GRANTS),
        ("operator", "session"),
        *extended(*((role, "session") for role in GRANTS if role != "operator")),
    ],
)
def test_every_route_is_allowed_or_refused_as_the_table_says(
    role: Role, way: str, app: FastAPI, services: Services, cheap_passwords: None
) -> None:
    user = add_user(services, role)
    client = bearer(app, token_of(services, user)) if way == "access_token" else browser(app, user.name)
    checked = 0
    for method, path in sorted(
        routes_of(app), key=lambda route: "/session" in route[1]
    ):  # those end the session
        key = (method, path.removeprefix("/api/v1"))
        if key in OPEN:
            continue
        answer = client.request(method, re.sub(r"\{\w+\}", "nobody", path))
        allowed = REQUIRED_ROLES[key] in GRANTS[role]
        ended = way == "session" and answer.status_code == 401 and "/session" in path
        assert ended or (answer.status_code in (401, 403)) != allowed, (key, answer.text)
        assert allowed or code_of(answer) == (403, "forbidden"), key
        checked += 1
    assert checked == len(REQUIRED_ROLES)


def test_a_method_that_a_route_does_not_have_is_refused(app: FastAPI) -> None:
    for method, path in routes_of(app):
        answer = anyone(app).request("TRACE", re.sub(r"\{\w+\}", "x", path))
        assert answer.status_code in (401, 405), (method, path)


def test_admins_may_do_everything_and_viewers_and_auditors_change_only_their_account() -> None:
    for (method, path), least in REQUIRED_ROLES.items():
        assert least in GRANTS["admin"]
        if method != "GET" and (method, path) not in OWN:
            assert least not in GRANTS["viewer"] | GRANTS["auditor"], (method, path)


def test_roles_include_the_documented_ones() -> None:
    assert GRANTS["viewer"] < GRANTS["operator"] < GRANTS["data_scientist"] < GRANTS["admin"]
    assert GRANTS["viewer"] < GRANTS["auditor"] < GRANTS["admin"]
    assert "auditor" not in GRANTS["data_scientist"]


def test_a_role_below_the_least_one_is_refused_by_name() -> None:
    viewer = Principal("access_token", "vera", "viewer", GRANTS["viewer"], project="default")
    with pytest.raises(Refusal, match="POST /runs needs the role data_scientist; vera has viewer") as refused:
        require_permission_of(viewer, ("POST", "/runs"))
    assert (refused.value.status, refused.value.code) == (403, "forbidden")


def test_a_route_without_an_entry_is_refused_even_to_admins_and_stops_the_start() -> None:
    with pytest.raises(Refusal, match="no role may use POST /new"):
        require_permission_of(ADMIN, ("POST", "/new"))
    router = APIRouter()
    router.add_api_route("/new", lambda: None, methods=["POST"])
    with pytest.raises(RuntimeError, match="/new"):
        require_complete([router], [])


def test_the_documentation_lists_what_each_role_may_do() -> None:
    page = (Path(__file__).parents[2] / "docs/people.md").read_text("utf-8")
    rows = re.findall(r"^\| `(GET|POST|PUT|PATCH|DELETE) (\S+)` \| (\w+) \|$", page, re.MULTILINE)
    assert {(method, path): role for method, path, role in rows} == REQUIRED_ROLES
