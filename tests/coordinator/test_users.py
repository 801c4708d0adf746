"""Users and their access tokens through the operator API, and which passwords are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from coordinator.accounts.admin_token import TOKEN_FILE, read_admin_token
from coordinator.context.services import Services
from coordinator.errors import Refusal
from coordinator.identity import access_tokens, passwords
from coordinator.identity.passwords import _hasher as real_hasher
from coordinator.identity.principals import GRANTS
from tests.support.people import (
    PASSWORD,
    Clock,
    add_user,
    app,
    app_of,
    bearer,
    cheap_passwords,
    clock,
    code_of,
    opened,
    services,
    token_of,
)
from tests.support.services import services_in

__all__ = ["app", "cheap_passwords", "clock", "opened", "services"]

pytestmark = pytest.mark.usefixtures("cheap_passwords")


@pytest.fixture
def admin(app: FastAPI, services: Services) -> TestClient:
    return bearer(app, read_admin_token(services.settings.home))


# Users


def test_users_are_added_listed_and_changed(admin: TestClient) -> None:
    made = admin.post("/api/v1/users", json={"name": " Berta ", "role": "auditor", "password": PASSWORD})
    assert made.status_code == 201
    assert (made.json()["name"], made.json()["role"], made.json()["disabled"]) == ("berta", "auditor", False)
    assert "password" not in made.json() and "hash" not in made.text
    listed = admin.get("/api/v1/users").json()
    assert made.json() in listed
    assert admin.patch("/api/v1/users/BERTA", json={"role": "admin"}).json()["role"] == "admin"
    again = {"name": "berta", "role": "viewer", "password": PASSWORD}
    assert code_of(admin.post("/api/v1/users", json=again)) == (409, "user_exists")
    assert code_of(admin.patch("/api/v1/users/nobody", json={"disabled": True})) == (404, "unknown_user")


@pytest.mark.parametrize("name", ["", " ", "-a", "a b", "ä", "a" * 65, "a\n", "a/b"])
def test_a_name_that_is_none_is_refused(admin: TestClient, name: str) -> None:
    answer = admin.post("/api/v1/users", json={"name": name, "role": "viewer", "password": PASSWORD})
    if name == "a\n":
        assert answer.status_code == 201  # blanks around a name do not count
    else:
        assert code_of(answer) == (422, "malformed")


def test_an_unknown_role_is_refused(admin: TestClient) -> None:
    answer = admin.post("/api/v1/users", json={"name": "x", "role": "root", "password": PASSWORD})
    assert code_of(answer) == (422, "malformed")
    assert PASSWORD not in answer.text


def test_the_admin_token_has_no_account_of_its_own(admin: TestClient) -> None:
    session = admin.get("/api/v1/session").json()
    assert (session["kind"], session["name"], session["csrf_token"]) == ("admin_token", "admin", None)
    assert code_of(admin.post("/api/v1/session/end-all")) == (409, "no_account")
    assert code_of(admin.post("/api/v1/access-tokens", json={"name": "x"})) == (409, "no_account")


def test_a_reset_password_is_the_only_one_from_then_on(
    admin: TestClient, services: Services, app: FastAPI
) -> None:
    user = add_user(services, "viewer")
    path = f"/api/v1/users/{user.name}/password"
    assert code_of(admin.put(path, json={"password": "123456789012"})) == (422, "weak_password")
    assert admin.put(path, json={"password": "three herons over wet slate"}).status_code == 204
    old = bearer(app, "x").post("/api/v1/session", json={"name": user.name, "password": PASSWORD})
    assert code_of(old) == (401, "bad_sign_in")


# Passwords


@pytest.mark.parametrize(
    ("password", "message"),
    [
        ("short", "5 characters, expected 12 to 1024"),
        ("x" * 1025, "1025 characters"),
        ("ababababababab", "different characters"),
        ("Password1234!", "first that are guessed"),
        ("123qwertyuiop!!!", "first that are guessed"),
        ("123456789012", "first that are guessed"),
        ("zyxwvutsrqponml", "first that are guessed"),
        ("my name is Berta!", "user's name"),
    ],
)
def test_a_weak_password_is_refused_with_the_reason(password: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        passwords.require_strong(password, "berta")
    assert refused.value.code == "weak_password"
    assert password not in str(refused.value)


def test_stored_passwords_are_argon2id_of_the_second_recommendation_of_rfc_9106() -> None:
    assert real_hasher().hash(b"x").startswith("$argon2id$v=19$m=65536,t=3,p=4$")
    first, second = passwords.hash_password(PASSWORD), passwords.hash_password(PASSWORD)
    assert first.startswith("$argon2id$v=19$")
    assert first != second
    assert passwords.is_password(first, PASSWORD)
    assert not passwords.is_password(first, PASSWORD + " ")
    assert not passwords.is_password(None, "the password of nobody")


# Access tokens


def test_an_access_token_acts_for_its_owner_with_its_role(app: FastAPI, services: Services) -> None:
    owner = add_user(services, "data_scientist")
    full = bearer(app, token_of(services, owner))
    made = full.post(
        "/api/v1/access-tokens", json={"name": "dashboard", "role": "viewer", "days": 0.5}
    ).json()
    assert made["token"].startswith(access_tokens.PREFIX)
    reader = bearer(app, made["token"])
    session = reader.get("/api/v1/session").json()
    assert (session["kind"], session["name"], session["role"], session["grants"]) == (
        "access_token",
        owner.name,
        "viewer",
        ["viewer"],
    )
    assert code_of(reader.post("/api/v1/tokens", json={})) == (403, "forbidden")
    listed = full.get("/api/v1/access-tokens").json()
    assert {each["name"] for each in listed} == {"test", "dashboard"}
    assert made["token"] not in full.get("/api/v1/access-tokens").text


@pytest.mark.parametrize("role", list(GRANTS))
def test_a_token_has_at_most_the_role_of_its_owner(role: str, app: FastAPI, services: Services) -> None:
    client = bearer(app, token_of(services, add_user(services, "operator")))
    answer = client.post("/api/v1/access-tokens", json={"name": "x", "role": role})
    if role in ("viewer", "operator"):
        assert answer.status_code == 201
    else:
        assert code_of(answer) == (403, "forbidden")


def test_a_token_with_less_than_its_owners_role_cannot_create_one_with_more(
    app: FastAPI, services: Services
) -> None:
    reader = bearer(app, token_of(services, add_user(services, "admin"), "viewer"))
    assert code_of(reader.post("/api/v1/access-tokens", json={"name": "x", "role": "admin"})) == (
        403,
        "forbidden",
    )
    assert code_of(reader.post("/api/v1/access-tokens", json={"name": "x"})) == (403, "forbidden")


def test_a_token_expires(app: FastAPI, services: Services, clock: Clock) -> None:
    client = bearer(app, token_of(services, add_user(services, "viewer"), days=2))
    clock.pass_time(days=1.99)
    assert client.get("/api/v1/system").status_code == 200
    clock.pass_time(days=0.02)
    assert code_of(client.get("/api/v1/system")) == (401, "bad_token")


def test_the_last_use_of_a_token_is_recorded_within_a_minute(
    app: FastAPI, services: Services, clock: Clock, admin: TestClient
) -> None:
    owner = add_user(services, "viewer")
    client = bearer(app, token_of(services, owner))

    def last_used() -> str:
        services.database.write(lambda at: None).result()  # writes are in order: those before are done
        return str(admin.get("/api/v1/access-tokens", params={"user": owner.name}).json()[0]["last_used_at"])

    assert last_used() == "None"
    client.get("/api/v1/system")
    assert last_used() == "2026-11-20T12:00:00Z"
    clock.pass_time(seconds=59)
    client.get("/api/v1/system")
    assert last_used() == "2026-11-20T12:00:00Z"
    clock.pass_time(seconds=1)
    client.get("/api/v1/system")
    assert last_used() == "2026-11-20T12:01:00Z"


def test_a_revoked_token_is_refused_with_all_that_it_created(
    app: FastAPI, services: Services, clock: Clock
) -> None:
    owner = add_user(services, "operator")
    first = bearer(app, token_of(services, owner))
    clock.pass_time(seconds=1)
    apart = bearer(app, token_of(services, owner))
    made = first.post("/api/v1/access-tokens", json={"name": "child", "days": 300}).json()
    assert made["expires_at"] == "2026-11-21T12:00:00Z"  # no later than the token that created it
    child = bearer(app, made["token"])
    grandchild = bearer(app, child.post("/api/v1/access-tokens", json={"name": "g"}).json()["token"])
    oldest = apart.get("/api/v1/access-tokens").json()[0]
    revoked = apart.post(f"/api/v1/access-tokens/{oldest['id']}/revoke").json()
    assert revoked["revoked_at"] == "2026-11-20T12:00:01Z"
    answers = [client.get("/api/v1/system").status_code for client in (first, child, grandchild, apart)]
    assert answers == [401, 401, 401, 200]


def test_tokens_of_others_are_neither_seen_nor_revoked_but_by_admins(
    app: FastAPI, services: Services, admin: TestClient
) -> None:
    one, other = add_user(services, "data_scientist"), add_user(services, "viewer")
    mine, theirs = bearer(app, token_of(services, one)), bearer(app, token_of(services, other))
    (token,) = theirs.get("/api/v1/access-tokens").json()
    assert token["id"] not in mine.get("/api/v1/access-tokens").text
    for path in (token["id"], "guessed"):
        answer = mine.post(f"/api/v1/access-tokens/{path}/revoke")
        assert code_of(answer) == (404, "unknown_access_token")
    query = {"user": other.name}
    assert code_of(mine.get("/api/v1/access-tokens", params=query)) == (403, "forbidden")
    wanted = {"name": "x", "user": other.name}
    assert code_of(mine.post("/api/v1/access-tokens", json=wanted)) == (403, "forbidden")
    assert admin.post("/api/v1/access-tokens", json=wanted).json()["user"] == other.name
    seen = admin.get("/api/v1/access-tokens", params=query).json()
    assert token["id"] in [each["id"] for each in seen]
    assert admin.post(f"/api/v1/access-tokens/{token['id']}/revoke").status_code == 200
    assert code_of(theirs.get("/api/v1/system")) == (401, "bad_token")


def test_a_user_has_a_bounded_number_of_tokens(
    app: FastAPI, services: Services, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(access_tokens, "MAX_LIVE", 2)
    client = bearer(app, token_of(services, add_user(services, "viewer")))
    assert client.post("/api/v1/access-tokens", json={"name": "x"}).status_code == 201
    assert code_of(client.post("/api/v1/access-tokens", json={"name": "y"})) == (409, "too_many_tokens")


def test_access_tokens_work_while_the_admin_token_is_lost(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        app = app_of(services)
        client = bearer(app, token_of(services, add_user(services, "viewer")))
        (services.settings.home / TOKEN_FILE).unlink()
        assert client.get("/api/v1/system").status_code == 200
        assert code_of(bearer(app, "guessed").get("/api/v1/system")) == (503, "no_admin_token")
