"""What a device did and sent, page by page; its group; and what needs a person, over the operator API."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import insert, text, update

from coordinator.accounts.admin_token import read_admin_token
from coordinator.context.services import Services
from coordinator.db import attention, device_history, events, tables
from coordinator.db.project_filter import working_for
from coordinator.db.store import Database
from coordinator.scheduling.matching import presence
from tests.support.databases import database, database_url
from tests.support.people import NOW, app_of, bearer, code_of
from tests.support.services import services_in

__all__ = ["database", "database_url"]


def device_row(name: str, **changed: Any) -> dict[str, Any]:
    row = {
        "id": name, "name": f"the {name}", "device_group": "default", "state": "active", "key_sha256": name,
        "enrolled_at": NOW, "certificate_until": NOW + timedelta(days=30), "report": {}, "project": "default",
        "last_seen_at": None, "expected_at": None,
    }  # fmt: skip
    return {**row, **changed}


def run_row(name: str, created: int, state: str = "running", project: str = "default") -> dict[str, Any]:
    return {
        "id": name, "name": f"run {name}", "state": state, "experiment": {}, "notices": [], "kind": "train", "round": 0,
        "created_at": NOW + timedelta(minutes=created), "project": project,
    }  # fmt: skip


def task_row(run: str, number: int, kind: str, state: str, **more: Any) -> dict[str, Any]:
    row = {
        "id": f"{run}-{number}-{kind}", "run": run, "round": number, "kind": kind, "position": 0, "device": "a",
        "runtime": "litert", "state": state, "offer": {}, "leased_until": None, "reason": None, "words": None,
        "answered_at": NOW,
    }  # fmt: skip
    return {**row, **more}


def fill(database: Database) -> None:
    """Two runs of device `a`: accepted, rejected and evaluated in the older, offered in the newer; and a run of another project."""
    at = {"device": "a", "position": 0, "accepted_at": NOW}
    figures = {"rows": 40, "labels": 40, "correct": 30, "loss_sum": 9.5}
    upload = {"sha256": "0", "decoded_bytes": 9, "encoding": "identity", "started_at": NOW}

    def write(connection: Any) -> None:
        connection.execute(insert(tables.devices), [device_row("a"), device_row("b")])
        connection.execute(
            insert(tables.runs),
            [run_row("old", 0), run_row("new", 1), run_row("foreign", 2, project="other")],
        )
        connection.execute(
            insert(tables.tasks),
            [
                task_row("old", 1, "train", "accepted"),
                task_row("old", 1, "evaluate", "accepted"),
                task_row("old", 2, "train", "rejected", reason="non_finite", words="it holds NaN"),
                task_row("new", 1, "train", "leased", leased_until=NOW, answered_at=None),
                task_row("foreign", 1, "train", "accepted"),
            ],
        )
        values = {
            "run": "old",
            "round": 1,
            "blob": "0",
            "sent_sha256": "0",
            "payload_bytes": 700,
            "seconds": 2.5,
        }
        connection.execute(insert(tables.updates).values(**at, **values))
        connection.execute(
            insert(tables.evaluations).values(run="old", round=1, device="a", result=figures, received_at=NOW)
        )
        connection.execute(insert(tables.uploads), [{"task": "old-2-train", "size_bytes": 650, **upload}])

    database.write(write).result()


def test_tasks_come_newest_first_with_what_was_sent_and_none_of_another_project(database: Database) -> None:
    fill(database)

    def read(connection: Any) -> Any:
        with working_for(connection, "default"):
            pages = [device_history.tasks_of(connection, "a", 2)]
            while pages[-1]:
                pages.append(device_history.tasks_of(connection, "a", 2, pages[-1][-1].id))
            return pages, device_history.tasks_of(connection, "a", 2, "foreign-1-train")

    pages, behind_a_foreign_task = database.read(read)
    found = [task for page in pages for task in page]
    assert [(each.id, each.sent_bytes, each.seconds) for each in found] == [
        ("new-1-train", None, None),
        ("old-2-train", 650, None),
        ("old-1-evaluate", None, None),
        ("old-1-train", 700, 2.5),
    ]
    assert found[1].words == "it holds NaN"
    assert found[2].reported is not None and found[2].reported["correct"] == 30
    assert [each.reported for each in found if each.kind == "train"] == [None, None, None]
    assert behind_a_foreign_task is None


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with services_in(tmp_path / "home") as opened:
        fill(opened.database)
        yield opened


@pytest.fixture
def admin(services: Services) -> TestClient:
    return bearer(app_of(services), read_admin_token(services.settings.home))


def test_a_devices_tasks_and_events_are_served_a_page_at_a_time(
    services: Services, admin: TestClient
) -> None:
    renewed = partial(events.record, clock_now=NOW, event="device_renewed")
    for number in range(3):
        services.commit(partial(renewed, device="a", number=number))
    services.commit(partial(renewed, device="b"))
    first = admin.get("/api/v1/devices/a/events", params={"limit": 2}).json()
    second = admin.get("/api/v1/devices/a/events", params={"limit": 2, "before": first["next"]}).json()
    assert [each["number"] for each in (*first["events"], *second["events"])] == [2, 1, 0]
    assert second["next"] is None
    tasks = admin.get("/api/v1/devices/a/tasks", params={"limit": 2}).json()
    assert [each["run_name"] for each in tasks["tasks"]] == ["run new", "run old"]
    rest = admin.get("/api/v1/devices/a/tasks", params={"after": tasks["next"]}).json()
    assert ([each["kind"] for each in rest["tasks"]], rest["next"]) == (["evaluate", "train"], None)
    assert code_of(admin.get("/api/v1/devices/a/tasks", params={"after": "none"})) == (404, "not_found")
    assert code_of(admin.get("/api/v1/devices/c/events")) == (404, "not_found")


def test_a_device_changes_its_group_and_keeps_everything_else(services: Services, admin: TestClient) -> None:
    before = admin.get("/api/v1/devices/a").json()
    after = admin.post("/api/v1/devices/a/group", json={"group": " hall-7 "}).json()
    assert after == {**before, "group": "hall-7"}
    admin.post("/api/v1/devices/a/group", json={"group": "hall-7"})  # no change, no event
    told = admin.get("/api/v1/devices/a/events").json()["events"]
    assert [(each["event"], each["before"], each["group"]) for each in told] == [
        ("device_regrouped", "default", "hall-7")
    ]
    refused = admin.post("/api/v1/devices/a/group", json={"group": "two\nlines"})
    assert code_of(refused) == (422, "malformed")
    services.commit(lambda at: at.execute(update(tables.devices).values(state="revoked")))
    assert code_of(admin.post("/api/v1/devices/a/group", json={"group": "x"})) == (409, "not_enrolled")


def test_presence_is_counted_as_each_device_shows_it(database: Database) -> None:
    times = [None, *(NOW + timedelta(seconds=late) for late in (-3600, -61, -60, -1, 0, 1, 900))]
    rows = [
        device_row(f"{first}/{second}", last_seen_at=seen, expected_at=due)
        for first, seen in enumerate(times)
        for second, due in enumerate(times)
        if seen is not None or due is None
    ]
    database.write(lambda at: at.execute(insert(tables.devices), rows)).result()
    counted = database.read(lambda at: attention.presences(at, NOW))
    alone = [presence(row["last_seen_at"], row["expected_at"], NOW) for row in rows]
    assert counted == {kind: alone.count(kind) for kind in ("online", "late", "offline")}
    assert all(counted.values())


def test_tasks_for_a_person_are_among_the_coordinators_figures(services: Services, admin: TestClient) -> None:
    def prepare(at: Any) -> None:
        at.execute(
            update(tables.devices)
            .where(tables.devices.c.id == "b")
            .values(certificate_until=services.clock() + timedelta(hours=1))
        )
        at.execute(
            update(tables.devices)
            .where(tables.devices.c.id == "a")
            .values(certificate_until=services.clock() + timedelta(days=29))
        )
        events.record(at, NOW, "round_waiting", run="old", eligible=1, wanted=3)
        events.record(at, NOW, "run_stalled", run="new", reason="the disk is full")

    services.commit(prepare)
    found = admin.get("/api/v1/system").json()
    assert found["late_renewals"] == 1
    assert [(each["run"], each["why"], each["wanted"], each["reason"]) for each in found["waiting_runs"]] == [
        ("old", "devices", 3, None),
        ("new", "stalled", None, "the disk is full"),
    ]
    services.commit(lambda at: events.record(at, NOW, "round_started", run="old"))
    services.commit(lambda at: events.record(at, NOW, "round_committed", run="new"))
    assert admin.get("/api/v1/system").json()["waiting_runs"] == []


def test_the_audit_log_is_verified_where_it_is_kept(services: Services, admin: TestClient) -> None:
    for group in ("x", "y", "z"):
        admin.post("/api/v1/devices/a/group", json={"group": group})
    intact = admin.get("/api/v1/audit/verify").json()
    assert (intact["intact"], intact["entries"], intact["signed_at"]) == (True, 6, None)
    signed = admin.get("/api/v1/audit/head").json()
    assert admin.get("/api/v1/audit/verify").json()["signed_at"] == signed["time"]
    services.commit(lambda at: at.execute(text("DELETE FROM audit WHERE number = 6")))
    shortened = admin.get("/api/v1/audit/verify").json()
    assert (shortened["intact"], shortened["entry"]) == (False, 6)
    services.commit(lambda at: at.execute(text("UPDATE audit SET principal = 'eve' WHERE number = 3")))
    altered = admin.get("/api/v1/audit/verify").json()
    assert (altered["intact"], altered["entry"], altered["entries"]) == (False, 3, None)
    assert "entry 3 was altered" in altered["reason"]
