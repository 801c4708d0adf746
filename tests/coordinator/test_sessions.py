"""Sessions of browsers: how they begin and end, their cookies, and pages of other sites that try to use them."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import select
from structlog.testing import capture_logs

from coordinator.accounts.admin_token import read_admin_token
from coordinator.context.services import Services
from coordinator.identity import passwords, sessions, setup_links, tables, users
from coordinator.limits.rates import PER_ADDRESS, PER_NAME
from tests.support.people import (
    ORIGIN,
    PASSWORD,
    Clock,
    add_user,
    anyone,
    app,
    app_of,
    bearer,
    browser,
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
COOKIE = "fedloop-session-8080"


@pytest.fixture
def anna(services: Services) -> users.UserRow:
    return add_user(services, "operator")


def sign_in(client: TestClient, name: str, password: str = PASSWORD) -> tuple[int, str]:
    answer = client.post("/api/v1/session", json={"name": name, "password": password})
    return (201, "") if answer.status_code == 201 else code_of(answer)


def is_signed_in(client: TestClient) -> bool:
    return client.get("/api/v1/session").status_code == 200


def until_written(services: Services) -> None:
    """Waits for the writes that requests do not wait for: they are done in order."""
    services.database.write(lambda at: None).result()


# Signing in


def test_a_session_acts_for_its_user(app: FastAPI, anna: users.UserRow) -> None:
    here = browser(app, anna.name)
    reported = here.get("/api/v1/session").json()
    assert (reported["kind"], reported["name"], reported["role"]) == ("session", anna.name, "operator")
    assert reported["grants"] == ["operator", "viewer"]
    assert reported["expires_at"] == "2026-11-21T00:00:00Z"
    assert here.post("/api/v1/tokens", json={}).status_code == 201
    assert code_of(here.post("/api/v1/runs", json={"experiment": ""})) == (403, "forbidden")


def test_names_are_the_same_in_upper_case_and_passwords_in_any_normal_form(
    app: FastAPI, services: Services
) -> None:
    composed, decomposed = "zw\u00f6lf kleine S\u00e4tze", "zwo\u0308lf kleine Sa\u0308tze"
    row = add_user(services, "viewer", password=composed)
    assert is_signed_in(browser(app, row.name.upper(), decomposed))


def test_wrong_names_wrong_passwords_and_disabled_users_get_the_same_answer(
    app: FastAPI, services: Services, anna: users.UserRow
) -> None:
    disabled = add_user(services, "admin")
    services.commit(lambda at: users.change_user(at, disabled.name, services.clock(), disabled=True))
    attempts = (
        (anna.name, "wrong"),
        ("nobody", PASSWORD),
        (disabled.name, PASSWORD),
        ("no\x00body", "\x00"),
    )
    answers = [
        anyone(app).post("/api/v1/session", json={"name": name, "password": password})
        for name, password in attempts
    ]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1
    assert all("set-cookie" not in answer.headers for answer in answers)
    unpaired = b'{"name": "no\\ud800body", "password": "\\ud800"}'
    odd = anyone(app, **{"Content-Type": "application/json"}).post("/api/v1/session", content=unpaired)
    assert odd.status_code in (401, 422)


def test_an_unknown_name_costs_the_same_work_as_a_wrong_password(
    app: FastAPI, anna: users.UserRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[str] = []
    hasher = passwords._hasher()

    class Counting:
        hash = hasher.hash

        def verify(self, password_hash: str, password: bytes) -> bool:
            verified.append(password_hash[:40].rpartition("$")[0])
            return hasher.verify(password_hash, password)

    monkeypatch.setattr(passwords, "_hasher", Counting)
    passwords._hash_of_nobody.cache_clear()
    assert sign_in(anyone(app), anna.name, "wrong") == sign_in(anyone(app), "nobody", "wrong")
    passwords._hash_of_nobody.cache_clear()
    assert len(verified) == 2
    assert verified[0] == verified[1]  # the same algorithm and cost


def test_signing_in_begins_a_new_session_and_ends_the_one_of_the_browser(
    app: FastAPI, services: Services, anna: users.UserRow
) -> None:
    """Fixation: a secret planted in the browser, or an earlier one, is worth nothing after a sign-in."""
    planted = "planted" * 6
    victim = anyone(app, Origin=ORIGIN)
    victim.cookies.set(COOKIE, planted, domain="127.0.0.1")
    assert sign_in(victim, anna.name)[0] == 201
    assert any(each.value != planted for each in victim.cookies.jar)
    thief = anyone(app)
    thief.cookies.set(COOKIE, planted)
    assert code_of(thief.get("/api/v1/session")) == (401, "session_ended")

    again = browser(app, anna.name)
    before = again.cookies[COOKIE]
    assert sign_in(again, anna.name)[0] == 201
    assert again.cookies[COOKIE] != before
    thief = anyone(app)
    thief.cookies.set(COOKIE, before)
    assert not is_signed_in(thief)


def test_no_secret_is_stored_or_logged(services: Services, app: FastAPI, anna: users.UserRow) -> None:
    with capture_logs() as logged:
        here = browser(app, anna.name)
        sign_in(anyone(app), anna.name, "a wrong one, which is nearly right")
        sign_in(anyone(app), "nearly right, in the wrong field", "x")
    secret = here.cookies[COOKIE]
    stored = services.database.read(
        lambda at: [
            str(row) for table in tables.metadata.tables.values() for row in at.execute(select(table))
        ]
    )
    for text in ("\n".join(stored), str(logged)):
        assert not any(
            each in text for each in (secret, PASSWORD, "nearly right", sessions.csrf_token(secret))
        )
    assert any(sessions.hash_of(secret) in row for row in stored)
    assert "$argon2id$" in str(stored)


# Cookies


def test_the_cookie_over_tls_is_for_this_host_and_tls_only(app: FastAPI, anna: users.UserRow) -> None:
    answer = anyone(app, "https://localhost").post(
        "/api/v1/session", json={"name": anna.name, "password": PASSWORD}
    )
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-fedloop-session=")
    attributes = {each.strip().lower() for each in cookie.split(";")[1:]}
    assert attributes == {"httponly", "secure", "samesite=strict", "path=/", "max-age=43200"}
    assert answer.headers["cache-control"] == "no-store"


def test_the_cookie_on_loopback_is_hidden_from_scripts_and_other_sites(
    app: FastAPI, anna: users.UserRow
) -> None:
    answer = anyone(app).post("/api/v1/session", json={"name": anna.name, "password": PASSWORD})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    attributes = {each.strip().lower() for each in cookie.split(";")[1:]}
    assert attributes == {"httponly", "samesite=strict", "path=/", "max-age=43200"}


def test_a_cookie_of_plain_http_is_none_over_tls(app: FastAPI, anna: users.UserRow) -> None:
    secret = browser(app, anna.name).cookies[COOKIE]
    over_tls = anyone(app, "https://localhost", Cookie=f"{COOKIE}={secret}")
    assert code_of(over_tls.get("/api/v1/session")) == (401, "no_token")


def test_passwords_are_not_taken_over_a_network_in_clear(opened: Services, anna: users.UserRow) -> None:
    named = replace(opened, settings=replace(opened.settings, names=("fed.example",)))
    app = app_of(named)
    request = {"name": anna.name, "password": PASSWORD}
    assert code_of(anyone(app, "http://fed.example:8080").post("/api/v1/session", json=request)) == (
        403,
        "needs_tls",
    )
    assert anyone(app, "https://fed.example").post("/api/v1/session", json=request).status_code == 201
    open_network = replace(named, settings=replace(named.settings, insecure_operator=True))
    clear = anyone(app_of(open_network), "http://fed.example:8080")
    assert clear.post("/api/v1/session", json=request).status_code == 201


# Requests that a page of another site makes the browser send


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Origin": "https://evil.example"}, "own page"),
        ({"Origin": "null"}, "own page"),
        ({"Origin": "http://127.0.0.1:9999"}, "own page"),
        ({"Origin": "http://127.0.0.1:8080.evil.example"}, "own page"),
        ({"Origin": ""}, "own page"),
        ({"X-CSRF-Token": ""}, "X-CSRF-Token"),
        ({"X-CSRF-Token": "0" * 64}, "X-CSRF-Token"),
        ({"X-CSRF-Token": "ü"}, "X-CSRF-Token"),
    ],
)
def test_a_change_from_another_page_is_refused(
    app: FastAPI, anna: users.UserRow, headers: dict[str, str], message: str
) -> None:
    here = browser(app, anna.name)
    encoded = {name: value.encode() for name, value in headers.items()}
    answer = here.post("/api/v1/tokens", json={}, headers=encoded)  # type: ignore[arg-type]
    assert code_of(answer) == (403, "csrf")
    assert message in answer.json()["error"]["message"]


def test_the_token_of_another_session_is_refused(app: FastAPI, anna: users.UserRow) -> None:
    here, other = browser(app, anna.name), browser(app, anna.name)
    token = other.headers["X-CSRF-Token"]
    assert token != here.headers["X-CSRF-Token"]
    assert code_of(here.post("/api/v1/tokens", json={}, headers={"X-CSRF-Token": token})) == (403, "csrf")


def test_a_form_of_another_site_changes_nothing(app: FastAPI, anna: users.UserRow) -> None:
    here = browser(app, anna.name)
    del here.headers["X-CSRF-Token"]
    for origin in ("https://evil.example", ORIGIN):
        answer = here.post("/api/v1/tokens", data={"uses": "5"}, headers={"Origin": origin})
        assert code_of(answer) == (403, "csrf")
    del here.headers["Origin"]
    assert code_of(here.post("/api/v1/tokens", data={"uses": "5"})) == (403, "csrf")


def test_another_site_cannot_sign_a_browser_in(app: FastAPI, anna: users.UserRow) -> None:
    body = {"name": anna.name, "password": PASSWORD}
    elsewhere = anyone(app, Origin="https://evil.example")
    assert code_of(elsewhere.post("/api/v1/session", json=body)) == (403, "csrf")
    assert code_of(elsewhere.post("/api/v1/session", data=body)) == (422, "malformed")
    assert code_of(anyone(app).post("/api/v1/session", data=body)) == (422, "malformed")


def test_a_page_of_plain_http_cannot_use_a_session_of_tls(app: FastAPI, anna: users.UserRow) -> None:
    here = browser(app, anna.name, base_url="https://localhost")
    assert here.post("/api/v1/tokens", json={}).status_code == 201
    stripped = here.post("/api/v1/tokens", json={}, headers={"Origin": "http://localhost"})
    assert code_of(stripped) == (403, "csrf")


def test_tokens_need_neither_origin_nor_csrf_token(
    app: FastAPI, services: Services, anna: users.UserRow
) -> None:
    for token in (token_of(services, anna), read_admin_token(services.settings.home)):
        assert bearer(app, token).post("/api/v1/tokens", json={}).status_code == 201


# The end of a session


def test_a_session_ends_an_hour_after_its_last_request(
    app: FastAPI, services: Services, clock: Clock, anna: users.UserRow
) -> None:
    here = browser(app, anna.name)
    for _ in range(3):
        clock.pass_time(minutes=59)
        assert is_signed_in(here)
        until_written(services)
    clock.pass_time(minutes=60)
    assert code_of(here.get("/api/v1/session")) == (401, "session_ended")


def test_a_session_ends_after_twelve_hours_however_much_it_is_used(
    app: FastAPI, services: Services, clock: Clock, anna: users.UserRow
) -> None:
    here = browser(app, anna.name)
    for _ in range(23):
        clock.pass_time(minutes=31)
        assert is_signed_in(here)
        until_written(services)
    clock.pass_time(minutes=7)
    assert not is_signed_in(here)


def test_signing_out_ends_the_session_on_the_server(app: FastAPI, anna: users.UserRow) -> None:
    here, elsewhere = browser(app, anna.name), browser(app, anna.name)
    secret = here.cookies[COOKIE]
    left = here.delete("/api/v1/session")
    assert left.status_code == 204
    assert re.search(rf'{COOKIE}="";.*Max-Age=0', left.headers["set-cookie"])
    here.cookies.set(COOKIE, secret)
    assert not is_signed_in(here)
    assert is_signed_in(elsewhere)


def test_signing_out_everywhere_ends_all_sessions_of_the_user_only(
    app: FastAPI, services: Services, anna: users.UserRow
) -> None:
    here, elsewhere = browser(app, anna.name), browser(app, anna.name)
    other = browser(app, add_user(services, "viewer").name)
    assert here.post("/api/v1/session/end-all").json() == {"ended": 2}
    assert not is_signed_in(here) and not is_signed_in(elsewhere)
    assert is_signed_in(other)


def test_a_new_password_ends_the_other_sessions_and_renews_this_one(
    app: FastAPI, anna: users.UserRow
) -> None:
    here, elsewhere = browser(app, anna.name), browser(app, anna.name)
    before = here.cookies[COOKIE]
    new = "three herons over wet slate"
    change = {"current_password": PASSWORD, "new_password": new}
    wrong = here.put("/api/v1/session/password", json={**change, "current_password": "wrong"})
    assert code_of(wrong) == (403, "bad_password")
    weak = here.put("/api/v1/session/password", json={**change, "new_password": "short"})
    assert code_of(weak) == (422, "weak_password")
    assert here.put("/api/v1/session/password", json=change).status_code == 204
    assert here.cookies[COOKIE] != before
    assert is_signed_in(here)
    assert not is_signed_in(elsewhere)
    assert sign_in(anyone(app), anna.name) == (401, "bad_sign_in")
    assert sign_in(anyone(app), anna.name, new)[0] == 201


def test_disabling_a_user_or_lowering_the_role_counts_from_the_next_request_on(
    app: FastAPI, services: Services, anna: users.UserRow
) -> None:
    admin = bearer(app, read_admin_token(services.settings.home))
    here, token = browser(app, anna.name), bearer(app, token_of(services, anna))
    lowered = admin.patch(f"/api/v1/users/{anna.name}", json={"role": "viewer"})
    assert (lowered.json()["role"], lowered.json()["disabled"]) == ("viewer", False)
    for client in (here, token):
        assert code_of(client.post("/api/v1/tokens", json={})) == (403, "forbidden")
    assert admin.patch(f"/api/v1/users/{anna.name}", json={"disabled": True}).json()["disabled"]
    assert code_of(here.get("/api/v1/system")) == (401, "session_ended")
    assert code_of(token.get("/api/v1/system")) == (401, "bad_token")
    assert not admin.patch(f"/api/v1/users/{anna.name}", json={"disabled": False}).json()["disabled"]
    assert code_of(here.get("/api/v1/system")) == (401, "session_ended")  # it ended for good
    assert token.get("/api/v1/system").status_code == 200


# Guessing


def test_guessing_a_password_is_stopped_before_it_is_compared(
    app: FastAPI, services: Services, anna: users.UserRow
) -> None:
    codes = [sign_in(anyone(app), anna.name, f"guess {at}") for at in range(PER_NAME + 3)]
    assert codes == [(401, "bad_sign_in")] * PER_NAME + [(429, "too_many_guesses")] * 3
    refused = anyone(app).post("/api/v1/session", json={"name": anna.name, "password": PASSWORD})
    assert code_of(refused) == (429, "too_many_guesses")  # the right one is not compared either
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["connection"] == "close"
    assert sign_in(anyone(app), add_user(services, "viewer").name)[0] == 201  # others sign in
    assert bearer(app, token_of(services, anna)).get("/api/v1/system").status_code == 200


def test_one_address_that_tries_many_names_is_stopped(app: FastAPI) -> None:
    # As time passes, further attempts are admitted: one every few seconds.
    codes = [sign_in(anyone(app), f"name-{at}")[0] for at in range(2 * PER_ADDRESS)]
    assert codes[:PER_ADDRESS] == [401] * PER_ADDRESS
    assert 429 in codes


def test_attempts_that_succeed_do_not_count(app: FastAPI, anna: users.UserRow) -> None:
    assert {sign_in(anyone(app), anna.name)[0] for _ in range(PER_ADDRESS + 5)} == {201}


def test_a_password_changes_only_together_with_the_session_that_goes_on(
    app: FastAPI, anna: users.UserRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = browser(app, anna.name)

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    change = {"current_password": PASSWORD, "new_password": "three herons over wet slate"}
    with monkeypatch.context() as patched:
        patched.setattr(sessions, "begin_session", fail)
        assert here.put("/api/v1/session/password", json=change).status_code == 500

    assert is_signed_in(here)
    assert sign_in(anyone(app), anna.name) == (201, "")


def test_a_session_cannot_guess_the_password_of_its_user(app: FastAPI, anna: users.UserRow) -> None:
    here = browser(app, anna.name)
    change = {"current_password": "a guess", "new_password": "three herons over wet slate"}
    codes = [here.put("/api/v1/session/password", json=change).status_code for _ in range(PER_NAME + 1)]
    assert codes == [403] * PER_NAME + [429]


# The first account


def test_the_setup_link_creates_the_first_admin_once(tmp_path: Path, clock: Clock) -> None:
    with services_in(tmp_path / "home") as opened:
        services = replace(opened, clock=clock)
        secret = services.commit(lambda at: setup_links.renew_setup_link(at, clock()))
        assert secret is not None
        setup_links.write_link(services.settings.home, f"{ORIGIN}/#setup={secret}")
        app = app_of(services)
        body = {"secret": secret, "name": "Anna", "password": PASSWORD}
        assert code_of(anyone(app).post("/api/v1/setup", json={**body, "secret": "guess"})) == (
            403,
            "setup_link_ended",
        )
        weak = anyone(app).post("/api/v1/setup", json={**body, "password": "anna is the first"})
        assert code_of(weak) == (422, "weak_password")
        made = anyone(app).post("/api/v1/setup", json=body)
        assert (made.status_code, made.json()["name"], made.json()["role"]) == (201, "anna", "admin")
        assert COOKIE in made.headers["set-cookie"]
        assert code_of(anyone(app).post("/api/v1/setup", json={**body, "name": "eve"})) == (
            403,
            "setup_link_ended",
        )
        assert not (services.settings.home / setup_links.LINK_FILE).exists()
        assert services.commit(lambda at: setup_links.renew_setup_link(at, clock())) is None


def test_a_setup_link_expires_and_a_later_one_replaces_it(tmp_path: Path, clock: Clock) -> None:
    with services_in(tmp_path / "home") as services:
        first, second = (
            services.commit(lambda at: setup_links.renew_setup_link(at, clock())) for _ in range(2)
        )
        assert first and second
        is_valid = setup_links.is_valid
        assert not services.database.read(lambda at: is_valid(at, first, clock()))
        assert services.database.read(lambda at: is_valid(at, second, clock()))
        clock.pass_time(days=1)
        assert not services.database.read(lambda at: is_valid(at, second, clock()))
        clock.pass_time(days=-0.5)
        add_user(services, "viewer")
        assert not services.database.read(lambda at: is_valid(at, second, clock()))


def test_of_four_who_use_the_link_at_once_one_becomes_admin(
    database_url: str, tmp_path: Path, clock: Clock
) -> None:
    with services_in(tmp_path / "home", database_url) as services:
        app = app_of(services)
        secret = services.commit(lambda at: setup_links.renew_setup_link(at, services.clock()))

        def use(name: str) -> int:
            body = {"secret": secret, "name": name, "password": PASSWORD}
            return anyone(app).post("/api/v1/setup", json=body).status_code

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(use, ("anna", "bob", "eve", "dan"))) == [201, 403, 403, 403]
        (admin,) = services.database.read(users.list_users)
        assert admin.role == "admin"
        here = browser(app, admin.name)
        made = here.post("/api/v1/access-tokens", json={"name": "ci", "role": "viewer"}).json()
        reader = bearer(app, made["token"])
        assert [user["name"] for user in here.get("/api/v1/users").json()] == [admin.name]
        assert code_of(reader.get("/api/v1/users")) == (403, "forbidden")
        assert here.post(f"/api/v1/access-tokens/{made['id']}/revoke").json()["revoked_at"]
        assert code_of(reader.get("/api/v1/system")) == (401, "bad_token")
        assert here.post("/api/v1/session/end-all").json()["ended"] == 2
