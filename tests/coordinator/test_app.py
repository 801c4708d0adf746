"""The operator API as a client sees it: who may call, the one form of errors, events from any point on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from coordinator.accounts.admin_token import read_admin_token
from coordinator.context.services import Services
from coordinator.db import events, runs
from coordinator.runs.service import RunService
from coordinator.server.app import (
    BODY_LIMIT_BYTES,
    device_app,
    operator_app,
)
from coordinator.server.metrics import Metrics
from tests.support.fake_devices import answering
from tests.support.services import services_in
from tests.support.waiting import wait_until

NOW = datetime(2026, 1, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with services_in(tmp_path_factory.mktemp("coordinator") / "home") as opened:
        yield opened


@pytest.fixture(scope="module")
def anyone(services: Services) -> TestClient:
    metrics = Metrics(services.database, services.signals)
    app = operator_app(services, RunService(services, answering), metrics)
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def admin(anyone: TestClient, services: Services) -> TestClient:
    token = read_admin_token(services.settings.home)
    return TestClient(
        anyone.app,
        base_url="http://127.0.0.1",
        headers={"Authorization": f"Bearer {token}"},
        raise_server_exceptions=False,
    )


def code_of(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_another_token_is_refused(anyone: TestClient) -> None:
    answer = anyone.get("/api/v1/system", headers={"Authorization": "Bearer guessed"})
    assert code_of(answer) == (401, "bad_token")


def test_operation_ids_are_unique_names(anyone: TestClient) -> None:
    paths = anyone.get("/api/openapi.json").json()["paths"]
    ids = [operation["operationId"] for operations in paths.values() for operation in operations.values()]
    assert len(set(ids)) == len(ids)
    assert all(each.isidentifier() for each in ids)


def test_errors_have_one_form(admin: TestClient) -> None:
    assert code_of(admin.get("/api/v1/nothing")) == (404, "not_found")
    assert code_of(admin.delete("/api/v1/system")) == (405, "method_not_allowed")
    assert code_of(admin.post("/api/v1/runs", json={})) == (422, "malformed")
    assert code_of(admin.get("/api/v1/runs/nobody")) == (404, "unknown_run")


def test_the_events_of_a_run_come_in_pages_from_either_end(admin: TestClient, services: Services) -> None:
    services.database.write(lambda at: runs.create(at, "paged", "paged", {}, [], NOW)).result()
    for number in range(4):
        record(services, "round_started", run="paged", round=number)
        record(services, "round_started", run="another", round=number)

    def pages(order: str, key: str) -> list[list[str]]:
        found, query = [], f"order={order}"
        while True:
            page = admin.get(f"/api/v1/runs/paged/events?limit=2&{query}").json()
            found.append([str(each.get("round", each["event"])) for each in page["events"]])
            if page["next"] is None:
                return found
            query = f"order={order}&{key}={page['next']}"

    assert pages("oldest", "after") == [["run_created", "0"], ["1", "2"], ["3"]]
    assert pages("newest", "before") == [["3", "2"], ["1", "0"], ["run_created"]]
    ids = [each["id"] for each in admin.get("/api/v1/runs/paged/events").json()["events"]]
    between = admin.get(f"/api/v1/runs/paged/events?after={ids[0]}&before={ids[3]}&order=newest").json()
    assert [each["id"] for each in between["events"]] == [ids[2], ids[1]]


@pytest.mark.parametrize("path", ["/events", "/runs/r/events"])
def test_an_event_number_beyond_those_of_the_database_is_refused(admin: TestClient, path: str) -> None:
    assert code_of(admin.get(f"/api/v1{path}?after={2**63}")) == (422, "malformed")


def test_a_wrong_experiment_is_refused_with_every_mistake(admin: TestClient) -> None:
    answer = admin.post("/api/v1/runs", json={"experiment": "[local]\nlr = -1\nepochs = 0\n"})
    assert code_of(answer) == (422, "bad_input")
    assert "local.lr" in answer.json()["error"]["message"]
    assert "local.epochs" in answer.json()["error"]["message"]


def test_a_name_that_is_not_ours_is_refused(admin: TestClient) -> None:
    """As a page of evil.example asks, once that name resolves to this machine."""
    assert code_of(admin.get("/api/v1/system", headers={"Host": "evil.example"})) == (421, "wrong_host")
    for ours in ("localhost:8080", "127.0.0.1:8080", "[::1]:8080", "10.0.0.7"):
        assert admin.get("/api/v1/system", headers={"Host": ours}).status_code == 200, ours


def test_a_body_that_is_too_large_is_refused_unread(admin: TestClient) -> None:
    answer = admin.post("/api/v1/runs", content=b"x" * (BODY_LIMIT_BYTES + 1))
    assert code_of(answer) == (413, "oversized")


def test_an_unexpected_error_is_reported_without_internals(
    admin: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a secret")

    monkeypatch.setattr("coordinator.api.runs.rows.newest", broken)
    answer = admin.get("/api/v1/runs")
    assert code_of(answer) == (500, "internal")
    assert "secret" not in answer.text


def test_a_full_disk_is_reported_as_one(admin: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coordinator.api.runs.rows.newest", full)
    assert code_of(admin.get("/api/v1/runs")) == (507, "disk_full")


def test_health_and_metrics_need_no_token_here(anyone: TestClient, services: Services) -> None:
    assert anyone.get("/healthz").json() == {"status": "ok"}
    elsewhere = TestClient(anyone.app, base_url="http://127.0.0.1", client=("192.0.2.1", 5000))
    assert code_of(elsewhere.get("/metrics")) == (401, "no_token")
    here = TestClient(anyone.app, base_url="http://127.0.0.1", client=("127.0.0.1", 5000))
    shown = here.get("/metrics").text
    assert "fedloop_held_polls 0.0" in shown
    assert 'fedloop_request_seconds_count{api="operator",route="/healthz",status="200"}' in shown


def test_the_device_api_hides_its_docs_and_asks_for_a_certificate(services: Services) -> None:
    app = device_app(services, Metrics(services.database, services.signals))
    with TestClient(app, raise_server_exceptions=False) as device:
        assert code_of(device.get("/docs")) == (404, "not_found")
        assert code_of(device.post("/device/v1/checkin", json={})) == (401, "no_certificate")


# Events


def record(services: Services, event: str, run: str | None = None, **values: Any) -> None:
    write = partial(events.record, clock_now=NOW, event=event, run=run, project="default", **values)
    services.database.write(write).result()
    services.signals.notify("events")


def read_to_the_end(admin: TestClient, query: str) -> list[Any]:
    """All events of a stream, up to the end of the server."""
    with admin.stream("GET", f"/api/v1/events{query}") as answer:
        assert answer.status_code == 200
        return [json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:")]


def test_events_are_replayed_and_go_on_live_until_the_server_ends(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        app = operator_app(
            services, RunService(services, answering), Metrics(services.database, services.signals)
        )
        token = read_admin_token(services.settings.home)
        admin = TestClient(app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {token}"})
        for at in range(3):
            record(services, "round_started", run="r", round=at)
        record(services, "round_started", run="other", round=9)

        def live() -> None:
            wait_until(lambda: services.signals.count_waiting("events") == 1)
            record(services, "run_finished", run="r")
            wait_until(lambda: services.signals.count_waiting("events") == 1)
            services.signals.close()

        beside = threading.Thread(target=live)
        beside.start()
        found = read_to_the_end(admin, "?run=r&after=1")
        beside.join()
    assert [each["event"] for each in found] == ["round_started", "round_started", "run_finished"]
    assert [each["id"] for each in found] == [2, 3, 5]
    first = {
        "id": 2,
        "time": "2026-01-05T00:00:00.000+00:00",
        "event": "round_started",
        "run": "r",
        "round": 1,
    }
    assert found[0] == first
