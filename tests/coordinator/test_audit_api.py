"""The audit log as the operator API writes it: every change leaves an entry, no secret does, refusals do not fill it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import text

from coordinator.accounts.admin_token import read_admin_token
from coordinator.api.audit_recorder import UNRECORDED
from coordinator.api.cookies import SAFE_METHODS
from coordinator.api.permissions import REQUIRED_ROLES
from coordinator.audit.entries import raw_entries
from coordinator.audit.verification import verify_chain
from coordinator.context.services import Services
from coordinator.db import tokens
from coordinator.identity import setup_links
from coordinator.limits.rates import TokenBuckets
from coordinator.runs.service import RunService
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from tests.support import people
from tests.support.fake_devices import answering
from tests.support.people import cheap_passwords  # noqa: F401  a fixture
from tests.support.services import services_in

CHANGES = [
    (method, path)
    for method, path in REQUIRED_ROLES
    if method not in SAFE_METHODS and (method, path) not in UNRECORDED
]
"""Of all routes that an app has (`require_complete`); those of strangers, `OPEN`, have a test of their own."""


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with services_in(tmp_path / "home") as opened:
        yield opened


@pytest.fixture
def app(services: Services) -> FastAPI:
    metrics = Metrics(services.database, services.signals)
    return operator_app(services, RunService(services, answering), metrics)


@pytest.fixture
def admin(app: FastAPI, services: Services) -> TestClient:
    return client(app, read_admin_token(services.settings.home))


def client(app: FastAPI, token: str) -> TestClient:
    return TestClient(
        app,
        base_url="http://127.0.0.1",
        headers={"Authorization": f"Bearer {token}"},
        raise_server_exceptions=False,
        client=("127.0.0.1", 5000),
    )


def log_of(services: Services) -> list[dict[str, Any]]:
    return services.database.read(lambda at: raw_entries(at, 0, 10_000))


def records(admin: TestClient, **query: Any) -> list[dict[str, Any]]:
    answer = admin.get("/api/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["records"]  # type: ignore[no-any-return]


def test_every_route_that_changes_something_is_announced_and_ended(
    admin: TestClient, services: Services
) -> None:
    """Of the API's own document, so a new route is tested too."""
    assert len(CHANGES) > 15
    for method, path in CHANGES:
        before = len(log_of(services))
        answer = admin.request(method, "/api/v1" + re.sub(r"\{\w+\}", "nobody", path), json={})
        begun, ended = log_of(services)[before:]
        for entry in (begun, ended):
            assert entry["action"] == f"{method} {path}"
            assert (entry["principal_kind"], entry["principal"]) == ("admin_token", "admin")
            assert entry["address"] == "127.0.0.1"
            assert set(json.loads(entry["resource"]).values()) == ({"nobody"} if "{" in path else set())
        assert (begun["stage"], begun["status"]) == ("begun", None)
        assert (ended["stage"], ended["begun"], ended["status"]) == (
            "ended",
            begun["number"],
            answer.status_code,
        )
    assert verify_chain(log_of(services)) == 2 * len(CHANGES)


def test_reading_leaves_nothing(admin: TestClient, services: Services) -> None:
    for path in ("/runs", "/tokens", "/audit", "/system"):
        assert admin.get("/api/v1" + path).status_code == 200
    assert log_of(services) == []


def test_a_record_says_who_changed_what_and_how_it_ended(admin: TestClient) -> None:
    made = admin.post("/api/v1/tokens", json={"group": "clinic", "uses": 3}).json()
    admin.post("/api/v1/tokens/nobody/withdraw")
    failed, done = records(admin)
    assert (done["outcome"], done["status"], done["action"]) == ("done", 201, "POST /tokens")
    assert done["details"] == {"group": "clinic", "uses": 3, "id": made["id"]}
    assert (failed["outcome"], failed["status"]) == ("failed", 404)
    assert (failed["resource"], failed["details"]) == ({"token": "nobody"}, {"code": "not_found"})


def test_filters_find_a_change_by_what_it_created(admin: TestClient) -> None:
    made = admin.post("/api/v1/tokens", json={}).json()["id"]
    admin.post("/api/v1/tokens", json={})
    admin.post(f"/api/v1/tokens/{made}/withdraw")
    assert [each["action"] for each in records(admin, resource=made[:8])] == [
        "POST /tokens/{token}/withdraw",
        "POST /tokens",
    ]
    assert len(records(admin, action="WITHDRAW")) == 1
    assert records(admin, by="nobody") == records(admin, refused=True) == []
    assert records(admin, since="2999-01-01T00:00:00Z") == []
    assert len(records(admin, since="2020-01-01T00:00:00Z", by="admin")) == 3
    assert records(admin, action="%") == []


def test_pages_lead_to_the_first_record(admin: TestClient) -> None:
    for _ in range(5):
        admin.post("/api/v1/tokens", json={})
    numbers: list[int] = []
    before = None
    while True:
        page = admin.get(
            "/api/v1/audit", params={"limit": 2, **({"before": before} if before else {})}
        ).json()
        numbers += [each["number"] for each in page["records"]]
        before = page["next"]
        if before is None:
            break
    assert numbers == [9, 7, 5, 3, 1]


def test_no_secret_and_no_payload_is_recorded(admin: TestClient, app: FastAPI, services: Services) -> None:
    secrets = [read_admin_token(services.settings.home)]
    secrets.append(admin.post("/api/v1/tokens", json={"group": "clinic"}).json()["token"])
    secrets.append(secrets[-1].rpartition(".")[2])
    content = b"weights that nobody may read"
    digest = hashlib.sha256(content).hexdigest()
    admin.put(f"/api/v1/model-files/{digest}", params={"offset": 0}, content=content)
    admin.post("/api/v1/runs", json={"experiment": "password = 'hunter2'", "sets": ["secret=hunter2"]})
    admin.post("/api/v1/tokens?key=hunter2", json={"group": {"nested": "hunter2"}})
    client(app, "guessed-hunter2").post("/api/v1/runs", json={"experiment": "hunter2"})
    database = b"".join(file.read_bytes() for file in services.settings.home.glob("fedloop.db*"))
    stored = json.dumps(log_of(services)) + admin.get("/api/v1/audit").text
    assert "clinic" in stored and digest in stored
    for secret in [*secrets, content.decode(), "hunter2"]:
        assert secret not in stored
        assert secret.encode() not in database


def test_a_change_that_cannot_be_announced_is_not_made(
    admin: TestClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coordinator.api.audit_recorder.append", full)
    assert admin.post("/api/v1/tokens", json={}).status_code == 507
    assert services.database.read(lambda at: tokens.usable(at, services.clock(), 10)) == []


def test_a_change_whose_outcome_cannot_be_recorded_is_answered_and_shown_as_unfinished(
    admin: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coordinator.api import audit_recorder

    append = audit_recorder.append

    def only_begun(connection: Any, entry: Any, now: Any) -> int:
        if entry.stage == "begun":
            return append(connection, entry, now)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("coordinator.api.audit_recorder.append", only_begun)
        assert admin.post("/api/v1/tokens", json={}).status_code == 201
    (record,) = records(admin)
    assert (record["outcome"], record["status"], record["ended_at"]) == ("unfinished", None, None)


def test_an_unexpected_failure_is_recorded_as_the_caller_saw_it(
    admin: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a secret")

    monkeypatch.setattr("coordinator.api.tokens.enrolment_tokens.create_token", broken)
    assert admin.post("/api/v1/tokens", json={}).status_code == 500
    (record,) = records(admin)
    assert (record["outcome"], record["status"], record["details"]) == ("failed", 500, {"code": "internal"})


def test_an_upload_in_pieces_is_recorded_once(admin: TestClient, services: Services) -> None:
    for name, pieces in (("a" * 64, 5), ("b" * 64, 2)):
        for offset in range(pieces):
            answer = admin.put(f"/api/v1/model-files/{name}", params={"offset": offset}, content=b"x")
            assert answer.status_code == 200
    assert [each["resource"] for each in records(admin)] == [{"sha256": "b" * 64}, {"sha256": "a" * 64}]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def viewer(app: FastAPI) -> TestClient:
    services: Services = app.state.services
    return client(app, people.token_of(services, people.add_user(services, "viewer", "vera")))


def refusals_of(services: Services) -> list[tuple[str, str, int, dict[str, Any]]]:
    return [
        (each["principal"], each["action"], each["status"], json.loads(each["details"]))
        for each in log_of(services)
        if each["stage"] == "refused"
    ]


@pytest.mark.usefixtures("cheap_passwords")
def test_a_refused_attempt_of_a_known_caller_is_recorded_even_of_reading(
    app: FastAPI, services: Services
) -> None:
    anyone = viewer(app)
    assert anyone.post("/api/v1/tokens", json={}).status_code == 403
    assert anyone.get("/api/v1/audit").status_code == 403
    assert anyone.get("/api/v1/runs").status_code == 200
    assert refusals_of(services) == [
        ("vera", "POST /tokens", 403, {"code": "forbidden"}),
        ("vera", "GET /audit", 403, {"code": "forbidden"}),
    ]


def of_a_viewer(app: FastAPI) -> Callable[[], int]:
    anyone = viewer(app)
    return lambda: anyone.post("/api/v1/tokens", json={}).status_code


def of_strangers(app: FastAPI) -> Callable[[], int]:
    anyone = client(app, "guessed")
    return lambda: anyone.post("/api/v1/tokens", json={}).status_code


@pytest.mark.usefixtures("cheap_passwords")
@pytest.mark.parametrize("caller", [of_a_viewer, of_strangers])
def test_refusals_do_not_fill_the_log_and_are_counted(
    app: FastAPI, services: Services, caller: Callable[[FastAPI], Callable[[], int]]
) -> None:
    clock = Clock()
    app.state.audit_recorder._refusals = TokenBuckets(1 / 60, 3, clock)
    attempt = caller(app)
    assert {attempt() for _ in range(15)} <= {401, 403}
    assert len(refusals_of(services)) == 3
    clock.now = 60.0
    attempt()
    *_, last = refusals_of(services)
    assert last[3]["not_recorded_before"] == 12


@pytest.mark.usefixtures("cheap_passwords")
def test_signing_in_is_recorded_once_it_succeeded_and_a_wrong_name_never(
    app: FastAPI, services: Services
) -> None:
    """People type passwords into the field for the name."""
    user = people.add_user(services, "operator")
    browser = people.browser(app, user.name)
    assert browser.post("/api/v1/tokens", json={}).status_code == 201
    wrong = {"name": "hunter2", "password": "hunter2-hunter2"}
    assert people.anyone(app).post("/api/v1/session", json=wrong).status_code == 401
    listed = [
        (each["action"], each["stage"], each["principal_kind"], each["principal"])
        for each in log_of(services)
    ]
    assert listed == [
        ("POST /session", "done", "session", user.name),
        ("POST /tokens", "begun", "session", user.name),
        ("POST /tokens", "ended", "session", user.name),
        ("POST /session", "refused", "anonymous", ""),
    ]
    stored = json.dumps(log_of(services))
    assert not any(
        secret in stored for secret in ("hunter2", people.PASSWORD, browser.headers["X-CSRF-Token"])
    )


@pytest.mark.usefixtures("cheap_passwords")
def test_the_first_account_is_recorded(app: FastAPI, services: Services) -> None:
    secret = services.commit(lambda at: setup_links.renew_setup_link(at, services.clock()))
    assert secret is not None
    body = {"secret": secret, "name": "ada", "password": people.PASSWORD}
    assert people.anyone(app).post("/api/v1/setup", json=body).status_code == 201
    (entry,) = log_of(services)
    assert (entry["action"], entry["stage"], entry["principal"]) == ("POST /setup", "done", "ada")
    assert secret not in json.dumps(entry)


@pytest.mark.usefixtures("cheap_passwords")
def test_passwords_of_users_and_texts_of_access_tokens_are_not_recorded(
    admin: TestClient, services: Services
) -> None:
    body = {"name": "grace", "role": "viewer", "password": people.PASSWORD}
    assert admin.post("/api/v1/users", json=body).status_code == 201
    made = admin.post("/api/v1/access-tokens", json={"name": "laptop", "user": "grace"}).json()
    assert (
        admin.put("/api/v1/users/grace/password", json={"password": "another tidal flat"}).status_code == 204
    )
    assert admin.patch("/api/v1/users/grace", json={"disabled": True}).status_code == 200
    change, reset, token, user = records(admin)
    assert (change["resource"], change["details"]) == (
        {"user": "grace"},
        {"disabled": True, "role": "viewer"},
    )
    assert (reset["resource"], reset["details"]) == ({"user": "grace"}, {})
    assert (token["details"]["id"], token["details"]["name"]) == (made["id"], "laptop")
    assert user["details"] == {"name": "grace", "role": "viewer"}
    stored = json.dumps(log_of(services))
    assert not any(secret in stored for secret in (made["token"], people.PASSWORD, "another tidal flat"))


def test_strangers_who_read_leave_nothing(app: FastAPI, services: Services) -> None:
    assert client(app, "guessed").get("/api/v1/runs").status_code == 401
    assert log_of(services) == []


def test_a_log_that_an_intruder_changed_can_still_be_read(admin: TestClient, services: Services) -> None:
    admin.post("/api/v1/tokens", json={})
    damage = "UPDATE audit SET status = 'x', details = x'ff', resource = '3', stage = 'y' WHERE number = 1"
    services.database.write(lambda at: at.execute(text(damage))).result()
    (record,) = records(admin)
    assert record["resource"] == {"unreadable": "'3'"}
    assert admin.get("/api/v1/audit/entries").json()["entries"][0]["status"] == "x"


def test_a_head_over_a_shortened_log_is_refused(admin: TestClient, services: Services) -> None:
    admin.post("/api/v1/tokens", json={})
    head = admin.get("/api/v1/audit/head").json()
    assert head["number"] == 2
    services.database.write(lambda at: at.execute(text("DELETE FROM audit WHERE number = 2"))).result()
    answer = admin.get("/api/v1/audit/head")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "audit_altered")
    assert answer.json()["error"]["head"] == head
