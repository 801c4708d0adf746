"""Which role may use which route: everything is refused unless the table says otherwise."""

from __future__ import annotations

import pytest
from fastapi import APIRouter

from coordinator.api.permissions import LEAST_ROLES, require_complete, require_permission_of
from coordinator.errors import Refusal
from coordinator.identity.principals import ADMIN, GRANTS, Principal


def test_admins_may_do_everything_and_viewers_and_auditors_change_nothing() -> None:
    for (method, path), least in LEAST_ROLES.items():
        assert least in GRANTS["admin"]
        if method != "GET":
            assert least not in GRANTS["viewer"] | GRANTS["auditor"], (method, path)


def test_roles_include_what_they_are_said_to_include() -> None:
    assert GRANTS["viewer"] < GRANTS["operator"] < GRANTS["data_scientist"] < GRANTS["admin"]
    assert GRANTS["viewer"] < GRANTS["auditor"] < GRANTS["admin"]
    assert "auditor" not in GRANTS["data_scientist"]


def test_a_role_below_the_least_one_is_refused_by_name() -> None:
    viewer = Principal("access_token", "vera", "viewer", GRANTS["viewer"])
    with pytest.raises(Refusal, match="POST /runs needs the role data_scientist; vera has viewer") as refused:
        require_permission_of(viewer, ("POST", "/runs"))
    assert (refused.value.status, refused.value.code) == (403, "forbidden")


def test_a_route_without_an_entry_is_refused_even_to_admins_and_stops_the_start() -> None:
    with pytest.raises(Refusal, match="forbidden|of nobody"):
        require_permission_of(ADMIN, ("POST", "/new"))
    router = APIRouter()
    router.add_api_route("/new", lambda: None, methods=["POST"])
    with pytest.raises(RuntimeError, match="/new"):
        require_complete([router])
