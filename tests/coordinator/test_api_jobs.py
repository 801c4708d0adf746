"""Jobs over the operator API: what is refused, in which order they start, what becomes of them, and what they leave."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomlkit
from fastapi.testclient import TestClient
from structlog.testing import capture_logs

from coordinator.accounts.admin_token import read_admin_token
from coordinator.context.services import Services
from coordinator.demos.local_fleet import local_fleet
from coordinator.errors import Refusal
from coordinator.jobs import service
from coordinator.jobs.service import JobService
from coordinator.runs.service import RunService
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from tests.support.cli import assert_refused, run_here
from tests.support.doorway import listening
from tests.support.fake_devices import answering
from tests.support.people import bearer, code_of
from tests.support.services import services_in

EXPERIMENT: dict[str, Any] = {
    "name": "small",
    "model": {"name": "logreg"},
    "data": {"dataset": "synthetic(shape=[4], classes=2, samples=60)"},
    "federation": {"rounds": 2, "clients": 3, "clients_per_round": 3, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 1},
}
ENDLESS = {**EXPERIMENT, "federation": {**EXPERIMENT["federation"], "rounds": 100_000}}
PATIENCE_SECONDS = 600.0


@contextmanager
def coordinator(home: Path, **settings: Any) -> Iterator[tuple[TestClient, JobService, Services]]:
    """The API of a coordinator whose jobs run."""
    with services_in(home, **settings) as services:
        jobs = JobService(services)
        app = operator_app(
            services, RunService(services, answering), Metrics(services.database, services.signals), jobs
        )
        jobs.start()
        try:
            yield bearer(app, read_admin_token(home)), jobs, services
        finally:
            jobs.close()


@contextmanager
def commands(client: TestClient, folder: Path) -> Iterator[Callable[..., Any]]:
    """Runs `fedloop` against this API."""
    with capture_logs(), listening(client.app) as port:
        token = client.headers["Authorization"].removeprefix("Bearer ")
        env = {"FEDLOOP_COORDINATOR": f"http://127.0.0.1:{port}", "FEDLOOP_ADMIN_TOKEN": token}
        yield partial(run_here, cwd=folder, env=env)


def start(client: TestClient, kind: str, document: Any, **more: Any) -> dict[str, Any]:
    answer = client.post("/api/v1/jobs", json={"kind": kind, "document": document, **more})
    assert answer.status_code == 201, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def until(client: TestClient, job: str, *states: str) -> dict[str, Any]:
    """The job once it is in one of these states."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        shown: dict[str, Any] = client.get(f"/api/v1/jobs/{job}").json()
        if shown["state"] in states:
            return shown
        assert shown["state"] in ("queued", "running"), (shown["state"], shown["error"])
        time.sleep(0.05)
    raise AssertionError(f"{job} is {shown['state']}: {shown['progress']}")


@pytest.mark.slow
def test_a_simulation_is_started_watched_and_leaves_its_report(tmp_path: Path) -> None:
    """By the command too."""
    with coordinator(tmp_path / "home") as (client, _, _), commands(client, tmp_path) as fedloop:
        file = tmp_path / "small.toml"
        file.write_text(tomlkit.dumps(EXPERIMENT))
        started = fedloop("jobs", "start", file, "--set", "federation.rounds=2", "--json")
        assert started.returncode == 0, started.stderr
        job = json.loads(started.stdout)
        assert (job["state"], job["name"], job["created_by"]) == ("queued", "small", "admin")
        done = until(client, job["id"], "finished")
        path = f"/api/v1/jobs/{job['id']}"
        assert (done["progress"]["done"], done["progress"]["total"]) == (2, 2)
        events = [event["event"] for event in client.get(f"{path}/events").json()["events"]]
        assert events[0] == "started" and events[-1] == "ended" and events.count("round") == 2
        assert [point["round"] for point in client.get(f"{path}/curve").json()] == [1, 2]
        report = client.get(f"{path}/report").json()
        assert report["final"]["test_accuracy"] > 0.5
        assert client.get(f"{path}/files/model.safetensors").content
        assert "small" in fedloop("jobs", "list").stdout
        assert "round 2/2" in fedloop("jobs", "show", "small").stdout
        assert (
            "event" not in (reported := fedloop("jobs", "logs", job["id"][:8], "--follow").stdout)
            and "ended" in reported
        )
        fetched = fedloop("jobs", "fetch", job["id"][:8], "--out", tmp_path / "fetched")
        assert fetched.returncode == 0 and (tmp_path / "fetched" / "model.safetensors").exists(), (
            fetched.stderr
        )
        assert_refused(fedloop("jobs", "show", "nothing"), "no job matches 'nothing'")
        assert_refused(fedloop("jobs", "start", "--kind", "compression"), "source")
        assert fedloop("jobs", "remove", "small").returncode == 0
        assert code_of(client.get(path)) == (404, "unknown_job")
    assert not list((tmp_path / "home" / "jobs").iterdir())


@pytest.mark.slow
def test_a_cancelled_job_ends_with_all_its_processes(tmp_path: Path) -> None:
    with coordinator(tmp_path / "home", job_slots=1) as (client, _, _):
        others = set(psutil.Process().children(recursive=True))  # of earlier tests in this process
        first, second = (start(client, "simulation", ENDLESS) for _ in range(2))
        path = f"/api/v1/jobs/{first['id']}"
        wait_for(lambda: (client.get(path).json()["progress"]["done"] or 0) >= 2)
        processes = set(psutil.Process().children(recursive=True)) - others
        assert processes
        assert (
            client.get(f"/api/v1/jobs/{second['id']}").json()["state"] == "queued"
        )  # the only slot is taken
        assert client.post(f"/api/v1/jobs/{second['id']}/cancel").json()["state"] == "cancelled"
        assert code_of(client.delete(path)) == (409, "job_state")
        assert client.post(f"{path}/cancel").json()["state"] == "cancelled"
        assert code_of(client.post(f"{path}/cancel")) == (409, "job_state")
        wait_for(lambda: not any(each.is_running() for each in processes))
        assert client.get(path).json()["state"] == "cancelled"


@pytest.mark.extended
@pytest.mark.slow
def test_a_job_of_a_killed_coordinator_is_interrupted_and_goes_on_when_resumed(tmp_path: Path) -> None:
    with local_fleet(tmp_path) as fleet:

        def done() -> int:
            return fleet.client.get(f"/jobs/{job}")["progress"]["done"] or 0

        job = fleet.client.post("/jobs", {"kind": "simulation", "document": ENDLESS})["id"]
        wait_for(lambda: done() >= 3)
        processes = [
            each
            for each in psutil.Process(fleet.coordinator.pid).children(recursive=True)
            if "job_process" in " ".join(each.cmdline()) or each.ppid() != fleet.coordinator.pid
        ]
        assert len(processes) >= 2  # its own, and a worker's
        fleet.coordinator.kill()
        wait_for(lambda: not any(each.is_running() for each in processes))
        fleet.serve()
        shown = fleet.client.get(f"/jobs/{job}")
        assert (shown["state"], shown["error"]) == (
            "interrupted",
            "the coordinator stopped while the job ran",
        )
        reached = done()
        fleet.client.post(f"/jobs/{job}/resume")
        wait_for(lambda: done() > reached)
        assert fleet.client.get(f"/jobs/{job}")["attempts"] == 2


@pytest.mark.extended
@pytest.mark.slow
def test_a_model_is_planned_pretrained_compressed_and_exported(tmp_path: Path) -> None:
    small = {"data": {"dataset": "digits"}, "model": {"name": "mlp"}, "train": {"steps": 60}}
    with coordinator(tmp_path / "home") as (client, _, _):
        ranked = start(client, "plan", {**small, "planner": {"processes": 2, "measure": 0}})
        until(client, ranked["id"], "finished")
        report = client.get(f"/api/v1/jobs/{ranked['id']}/report").json()
        assert {"plan", "seconds", "parts"} <= report["ranking"][0].keys()

        split = {**small, "plan": {"dp": 2}, "profile": {}}
        trained = start(client, "pretraining", split, priority=3)
        assert trained["processes"] == 2
        done = until(client, trained["id"], "finished")
        assert (done["progress"]["unit"], done["progress"]["done"], done["progress"]["total"]) == (
            "step",
            60,
            60,
        )
        path = f"/api/v1/jobs/{trained['id']}"
        assert [point["step"] for point in client.get(f"{path}/curve", params={"points": 10}).json()][
            -1
        ] == 60
        assert "rows_per_second" in client.get(f"{path}/curve").json()[0]
        profile = client.get(f"{path}/report").json()["profile"]
        assert sum(profile["mean_seconds"].values()) > 0 and 0 <= profile["bubble_share"] <= 1

        pipeline = {"test_rows": 100, "step": [{"kind": "quantize", "precision": "static-int8"}]}
        compressed = start(client, "compression", pipeline, source=trained["id"])
        until(client, compressed["id"], "finished")
        exported = start(client, "export", {"name": "digits", "version": 2}, source=compressed["id"])
        files = until(client, exported["id"], "finished")["files"]
        assert {"manifest.json", "model.tflite", "report.json"} <= files.keys()

        wrong = start(client, "compression", {"step": [{"kind": "shrink"}]}, source=trained["id"])
        failed = until(client, wrong["id"], "failed")
        assert "shrink" in failed["error"] and str(tmp_path) not in failed["error"]
        answer = client.post(
            "/api/v1/jobs", json={"kind": "export", "document": {"name": "a"}, "source": wrong["id"]}
        )
        assert code_of(answer) == (409, "job_state")


def test_a_document_is_refused_with_all_its_problems(tmp_path: Path) -> None:
    with coordinator(tmp_path / "home") as (client, _, _):

        def refused(kind: str, document: Any, **more: Any) -> tuple[int, str, str]:
            answer = client.post("/api/v1/jobs", json={"kind": kind, "document": document, **more})
            return *code_of(answer), answer.json()["error"]["message"]

        wrong = 'name = "x"\n[federation]\nrounds = -1\nclient = 3\n'
        assert refused("simulation", wrong)[:2] == (422, "bad_input")
        assert (
            "federation.rounds" in (found := refused("simulation", wrong)[2])
            and "federation.client " in found
        )
        wrong = {"train": {"lr": -1}, "checkpoint": {"every": -1}}
        assert "lr" in (found := refused("pretraining", wrong)[2]) and "checkpoint.every" in found
        assert "5 processes" in refused("pretraining", {"plan": {"dp": 5}})[2]
        assert "2 problems" in refused("export", {"name": "A b", "version": 0})[2]
        assert "rows" in refused("compression", {"rows": 0})[2]
        assert "source" in refused("compression", {})[2]
        assert refused("compression", {}, source="nobody")[:2] == (404, "unknown_job")
        assert refused("simulation", EXPERIMENT, source="nobody")[:2] == (422, "bad_input")
        assert "not valid TOML" in refused("simulation", "name =")[2]
        assert client.get("/api/v1/jobs").json() == []
        assert not (tmp_path / "home" / "jobs").exists()


@pytest.mark.parametrize(
    ("kind", "document", "code"),
    [
        ("simulation", {"model": {"name": "mine:build"}}, "code_not_allowed"),
        ("simulation", {"data": {"dataset": "mine:load"}}, "code_not_allowed"),
        ("simulation", {"strategy": {"name": "mine:Median"}}, "code_not_allowed"),
        ("simulation", {"data": {"dataset": "csv", "path": "/etc/passwd"}}, "path_not_allowed"),
        ("simulation", {"model": {"init": "/etc/passwd"}}, "path_not_allowed"),
        ("pretraining", {"model": {"name": "mine:build"}}, "code_not_allowed"),
        ("pretraining", {"data": {"dataset": "mine:load"}}, "code_not_allowed"),
        ("pretraining", {"data": {"dataset": "text", "path": "/etc/passwd"}}, "path_not_allowed"),
        ("pretraining", {"model": {"init": "/etc/passwd"}}, "path_not_allowed"),
        ("pretraining", {"data": {"dataset": "tokens", "path": "/etc"}}, "path_not_allowed"),
        ("pretraining", {"profile": {"folder": "../../keys"}}, "path_not_allowed"),
        ("plan", {"planner": {"profile": "/etc/passwd"}}, "path_not_allowed"),
        ("plan", {"data": {"dataset": "csv", "path": "/etc/passwd"}}, "path_not_allowed"),
        ("compression", {"data": {"dataset": "mine:load"}}, "code_not_allowed"),
        ("compression", {"data": {"dataset": "csv", "path": "/etc/passwd"}}, "path_not_allowed"),
        ("compression", {"student": {"name": "mine:build"}}, "code_not_allowed"),
        ("compression", {"step": [{"kind": "distil", "student": "mine:build"}]}, "code_not_allowed"),
        ("compression", {"step": [{"kind": "distil", "teachers": "/home"}]}, "path_not_allowed"),
        ("export", {"name": "a", "data": {"dataset": "mine:load"}}, "code_not_allowed"),
        ("export", {"name": "a", "data": {"dataset": "csv", "path": "/etc/passwd"}}, "path_not_allowed"),
        ("export", {"name": "a", "model": {"name": "/tmp/net.keras"}}, "code_not_allowed"),
    ],
)
def test_a_document_names_no_code_and_no_file_outside_the_data_folders(
    kind: str, document: Any, code: str, refusing: TestClient
) -> None:
    answer = refusing.post("/api/v1/jobs", json={"kind": kind, "document": document})
    assert code_of(answer) == (422, code), answer.text


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with coordinator(tmp_path_factory.mktemp("refusing") / "home") as (client, _, _):
        yield client


def test_only_so_many_jobs_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_LIVE", 2)
    with services_in(tmp_path / "home") as services:  # a closed service starts none of them
        jobs = JobService(services)
        jobs.close()
        for _ in range(2):
            jobs.create("simulation", EXPERIMENT, (), None, 0, "admin")
        with pytest.raises(Refusal, match="2 jobs have not ended"):
            jobs.create("simulation", EXPERIMENT, (), None, 0, "admin")


def test_a_coordinator_without_slots_runs_no_jobs(tmp_path: Path) -> None:
    with coordinator(tmp_path / "home", job_slots=0) as (client, _, _):
        answer = client.post("/api/v1/jobs", json={"kind": "simulation", "document": EXPERIMENT})
        assert code_of(answer) == (409, "no_jobs")


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
