"""`fedloop runs` over folders and over a real operator API, and what a resume may change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from coordinator.accounts.admin_token import TOKEN_FILE, ensure_admin_token
from coordinator.db import runs, tables
from coordinator.db.store import Database
from coordinator.experiments.experiment import resolve
from coordinator.output_folders import locked
from coordinator.reports import run_files, run_folders
from coordinator.rounds.records import RoundRecord, as_row
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from tests.support.cli import assert_refused, options, report_of, run_here
from tests.support.databases import with_tables
from tests.support.doorway import START, Device, Door, listening, open_door

TINY = {
    "data": {"dataset": "synthetic(shape=[4], classes=2, samples=6)"},
    "model": {"name": "logreg"},
    "federation": {"clients": 2, "rounds": 2, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 1},
    "simulation": {"workers": 1},
}
SETS = [
    "data.dataset=synthetic(shape=[4], classes=2, samples=6)", "model.name=logreg", "federation.clients=2",
    "federation.runtimes={torch=1}", "local.epochs=1", "simulation.workers=1", "strategy.name=scaffold",
]  # fmt: skip
RECORD = RoundRecord(1, 2, 1, 0, 1, 0.7, 0.5, 0.75, 0.5, 0.75, 1.0, 10, 20, 1.5, {})

Fedloop = Callable[..., CompletedProcess[str]]


@pytest.fixture
def fedloop(tmp_path: Path) -> Fedloop:
    """Runs the command in a folder of its own, without a coordinator."""
    return partial(run_here, cwd=tmp_path, env={"FEDLOOP_HOME": str(tmp_path / "nobody")})


def make_folder(folder: Path, document: dict[str, Any], rounds: int = 1, run: str | None = None) -> Path:
    """A folder as a run leaves it that was killed after so many rounds."""
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(resolve(document, "test").to_toml())
    lines = run_files.open_lines(folder, None)
    first = {
        "time": "2026-01-05T12:00:00+00:00",
        "event": "run_started",
        "test_loss": 0.9,
        "test_accuracy": 0.5,
    }
    lines["events.jsonl"].append(json.dumps(first if run is None else {**first, "run": run}))
    for number in range(1, rounds + 1):
        run_files.append_round(lines["rounds.csv"], replace(RECORD, round=number))
    for file in lines.values():
        file.close()
    return folder


def test_runs_in_folders_are_listed_with_their_state(tmp_path: Path, fedloop: Fedloop) -> None:
    make_folder(tmp_path / "runs" / "killed", TINY)
    active = make_folder(tmp_path / "runs" / "active", TINY, rounds=0)
    (make_folder(tmp_path / "runs" / "torn", TINY) / "events.jsonl").write_text("{\n")
    make_folder(tmp_path / "runs" / "fleet", TINY, run="3f2a1111-x")
    (tmp_path / "runs" / "pretrained").mkdir()
    with locked(active / ".lock", AssertionError()):
        rows = json.loads(fedloop("runs", "list", "--json").stdout)
    assert {(row["id"], row["state"], row["round"]) for row in rows} == {
        ("runs/killed", "interrupted", 1),
        ("runs/active", "running", 0),
        ("runs/torn", "damaged", 0),
        ("runs/fleet", "unfollowed", 1),
    }
    assert "runs/killed" in fedloop("runs", "list").stdout
    assert "no runs in" in fedloop("runs", "list", "--folder", tmp_path / "runs" / "pretrained").stdout
    assert_refused(fedloop("runs", "list", "--folder", "none"), "--folder none: there is no such folder")


def test_a_folder_is_named_by_its_path_its_name_or_the_beginning(tmp_path: Path, fedloop: Fedloop) -> None:
    for name in ("fast-1", "fast-2", "slow"):
        make_folder(tmp_path / "runs" / name, TINY)
    for reference in ("runs/slow", "slow", "sl", tmp_path / "runs" / "slow"):
        shown = fedloop("runs", "show", reference)
        assert (
            "slow  synthetic: interrupted, round 1 of 2\ntest accuracy 0.7500 after round 1" in shown.stdout
        )
    assert_refused(fedloop("runs", "show", "fast"), "'fast' matches 2 runs", "runs/fast-1", "give more of it")
    assert_refused(fedloop("runs", "show", "none"), "no run in runs/ matches 'none'", "fedloop runs list")
    assert_refused(fedloop("runs", "show", ""), "RUN is empty")


def test_events_of_a_folder_are_printed(tmp_path: Path, fedloop: Fedloop) -> None:
    make_folder(tmp_path / "runs" / "mine", TINY)
    assert (
        fedloop("runs", "logs", "mine").stdout
        == "2026-01-05 12:00:00 run_started test_loss=0.9 test_accuracy=0.5\n"
    )
    assert json.loads(fedloop("runs", "logs", "mine", "--json").stdout)["event"] == "run_started"
    assert_refused(fedloop("runs", "logs", "mine", "--follow"), "tail -f runs/mine/events.jsonl")


def test_runs_are_compared_by_the_keys_that_differ_and_their_figures(
    tmp_path: Path, fedloop: Fedloop
) -> None:
    make_folder(tmp_path / "runs" / "a", TINY)
    make_folder(tmp_path / "runs" / "b", {**TINY, "local": {"steps": 3, "lr": 0.5}}, rounds=2)
    compared = json.loads(fedloop("runs", "compare", "a", "b", "--json").stdout)
    assert compared["runs"] == ["runs/a", "runs/b"]
    assert compared["experiment"] == {
        "local.epochs": [1, None],
        "local.steps": [None, 3],
        "local.lr": [0.05, 0.5],
    }
    assert compared["final"]["rounds"] == [1, 2]
    assert compared["final"]["bytes_up"] == [10, 20]
    assert compared["final"]["test_accuracy"] == [0.75, 0.75]
    table = fedloop("runs", "compare", "a", "b").stdout
    assert table.split()[:2] == ["runs/a", "runs/b"] and "local.steps" in table and "data." not in table
    assert_refused(fedloop("runs", "compare", "a"), "two runs or more")

    for name, metrics in (("a", {"r2": 0.5, "mae": 12.0, "rmse": 15.0}), ("b", {"auc": 0.75})):
        folder = tmp_path / "runs" / name
        report = run_folders.read_report(folder)
        final = {**report["final"], "metrics": metrics, "model_sha256": "0" * 64}
        (folder / "report.json").write_text(json.dumps({**report, "final": final}))
        (folder / "model.safetensors").write_bytes(b"")
    found = json.loads(fedloop("runs", "compare", "a", "b", "--json").stdout)["final"]
    assert (found["r2"], found["mae"], found["auc"]) == ([0.5, None], [12.0, None], [None, 0.75])


def test_runs_are_compared_over_simulated_time(tmp_path: Path, fedloop: Fedloop) -> None:
    timed = {"simulated_seconds": 4.0, "seconds": 0.5, "bytes_up": 10}
    for name, accuracies in (("slow", (0.5, 0.7, 0.9)), ("fast", (0.85, 0.8))):
        folder = make_folder(tmp_path / "runs" / name, TINY, rounds=0)
        lines = run_files.open_lines(folder, None)
        lines["events.jsonl"].append(
            json.dumps(
                {
                    "event": "run_started",
                    "time": "2026-01-05T12:00:00Z",
                    "test_loss": 0.9,
                    "test_accuracy": 0.5,
                }
            )
        )
        for number, accuracy in enumerate(accuracies, start=1):
            run_files.append_round(
                lines["rounds.csv"], replace(RECORD, round=number, test_accuracy=accuracy, **timed)
            )
        for file in lines.values():
            file.close()
    done = fedloop(
        "runs", "compare", "slow", "fast", "--accuracy", 0.8, "--plot", tmp_path / "p.png", "--json"
    )
    compared = json.loads(done.stdout)
    assert compared["final"]["simulated_seconds"] == [12.0, 8.0]
    assert compared["until"] == {
        "rounds_until_accuracy_0.8": [3, 1], "bytes_up_until_accuracy_0.8": [30, 10],
        "seconds_until_accuracy_0.8": [1.5, 0.5], "simulated_seconds_until_accuracy_0.8": [12.0, 4.0],
    }  # fmt: skip
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    never = json.loads(fedloop("runs", "compare", "slow", "fast", "--accuracy", 0.88, "--json").stdout)[
        "until"
    ]
    assert never["simulated_seconds_until_accuracy_0.88"] == [12.0, None]
    make_folder(tmp_path / "runs" / "real", TINY)
    refused = fedloop("runs", "compare", "slow", "real", "--plot", tmp_path / "q.png")
    assert_refused(refused, "--plot draws over simulated time, and runs/real has none")
    assert not (tmp_path / "q.png").exists()


def test_operations_that_a_folder_does_not_support_are_refused_with_the_reason(
    tmp_path: Path, fedloop: Fedloop
) -> None:
    fleet = make_folder(tmp_path / "runs" / "fleet", TINY, run="3f2a1111-x")
    make_folder(tmp_path / "runs" / "mine", TINY)
    assert_refused(fedloop("runs", "resume", "fleet"), "on devices", "fedloop runs resume 3f2a1111")
    assert_refused(fedloop("simulate", "--resume", fleet), "on devices", "fedloop run --follow 3f2a1111")
    assert_refused(fedloop("runs", "extend", "fleet", "--rounds", "9"), "on devices", "add-run 3f2a1111")
    assert_refused(fedloop("runs", "cancel", "mine"), "runs/mine", "Ctrl-C")
    assert_refused(fedloop("runs", "extend", "mine", "--rounds", "2"), "has 2 rounds already")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed=8", "seed was 7, requested is 8"),
        ("local.lr=0.5", "local.lr was 0.05, requested is 0.5"),
        ("simulation.wrkers=2", "simulation.wrkers is not a known key"),
        ("federation.rounds=0", "federation.rounds = 0"),
    ],
)
def test_a_resume_changes_rounds_and_workers_only(
    tmp_path: Path, fedloop: Fedloop, setting: str, message: str
) -> None:
    folder = make_folder(tmp_path / "runs" / "mine", TINY)
    before = (folder / "experiment.toml").read_text()
    refused = fedloop("simulate", "--resume", folder, "--set", "federation.rounds=9", "--set", setting)
    assert_refused(refused, message)
    assert (folder / "experiment.toml").read_text() == before


@pytest.mark.slow
def test_an_extended_run_is_the_run_of_so_many_rounds_from_the_start(
    tmp_path: Path, fedloop: Fedloop
) -> None:
    for out, rounds in (("short", 2), ("long", 4)):
        done = fedloop("simulate", "--out", f"runs/{out}", *options([*SETS, f"federation.rounds={rounds}"]))
        assert done.returncode == 0, done.stderr
    short, long = tmp_path / "runs" / "short", tmp_path / "runs" / "long"
    tracked = "--tensorboard", tmp_path / "events"
    extended = fedloop("runs", "extend", "short", "--rounds", "4", "--json", *tracked)
    assert extended.returncode == 0, extended.stderr
    assert report_of(short)["final"] == report_of(long)["final"]
    assert [row["round"] for row in report_of(short)["rounds"]] == [1, 2, 3, 4]
    assert report_of(short)["experiment"] == report_of(long)["experiment"]
    assert_refused(
        fedloop("simulate", "--resume", short, "--set", "federation.rounds=3"), "less than the 4 rounds"
    )
    assert any((tmp_path / "events" / "short").iterdir())
    again = fedloop(
        "runs", "resume", "short", "--set", "simulation.workers=2", "--tensorboard", tmp_path / "again"
    )
    assert any((tmp_path / "again" / "short").iterdir())
    assert again.returncode == 0 and "already finished" in again.stderr
    assert run_folders.read_run(short).state == "finished"


@pytest.mark.slow
def test_a_finished_run_that_cannot_be_extended_stays_as_it_is(tmp_path: Path, fedloop: Fedloop) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "0,u\n1,v\n" * 20)
    sets = [*SETS[1:], "data.dataset=csv", "data.path=t.csv", "data.label=y", "federation.rounds=1"]
    done = fedloop("simulate", "--out", "runs/mine", *options([*sets, "data.partition=iid"]))
    assert done.returncode == 0, done.stderr
    (tmp_path / "t.csv").unlink()
    assert_refused(fedloop("runs", "extend", "mine", "--rounds", "2"), "t.csv")
    assert not (tmp_path / "runs" / "mine" / "work").exists()
    run = run_folders.read_run(tmp_path / "runs" / "mine")
    assert (run.state, run.rounds) == ("finished", 1)
    again = fedloop("runs", "resume", "mine")
    assert again.returncode == 0 and "already finished" in again.stderr


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    home = tmp_path_factory.mktemp("home")
    url = f"sqlite:///{home}/fedloop.db"
    with_tables(url)
    database = Database(url)
    ensure_admin_token(home)
    with open_door(home, database, device_url="https://fed.example:8443") as opened:
        yield opened
    database.close()


class Cancelled:
    """The run service as far as a cancellation needs it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def cancel(self, run: str) -> None:
        self._database.write(partial(runs.end, run=run, state="cancelled", now=START)).result()

    def resume(self, run: str) -> None:
        self._database.write(partial(runs.resume, run=run, now=START)).result()


@pytest.fixture
def remote(coordinator: Door, tmp_path: Path) -> Iterator[Fedloop]:
    """Runs the command beside a coordinator with the runs 0aa…, cancelled, and 0bb…, in progress after one round."""
    services = coordinator.services
    app: FastAPI = operator_app(services, Any, Metrics(services.database, services.signals))  # type: ignore[arg-type]
    app.state.runs = Cancelled(services.database)
    with capture_logs(), listening(app) as port:
        token = (services.settings.home / TOKEN_FILE).read_text().strip()
        env = {"FEDLOOP_COORDINATOR": f"http://127.0.0.1:{port}", "FEDLOOP_ADMIN_TOKEN": token}
        yield partial(run_here, cwd=tmp_path, env=env)


@pytest.fixture(scope="module")
def two_runs(coordinator: Door) -> None:
    """A run of each state, and one that predicts quantities: after its last round, and not yet judged by own rows."""
    experiment = resolve(TINY, "test", "devices").model_dump(mode="json", exclude_none=True)
    database = coordinator.services.database
    for run, name in {"0aa11111-x": "digits", "0bb33333-x": "pumps", "0cc44444-x": "prices"}.items():
        create = partial(
            runs.create, run=run, name=name, experiment=experiment, notices=["a notice"], now=START
        )
        database.write(create).result()
        database.write(
            partial(
                runs.begin,
                run=run,
                prepared={},
                params="p",
                strategy_state="s",
                notices=["a notice"],
                now=START,
            )
        ).result()
    quantities = as_row(replace(RECORD, test_accuracy=None)) | {"on_devices": {"metrics": {"r2": 0.25}}}
    for run, row in {"0bb33333-x": as_row(RECORD), "0cc44444-x": quantities}.items():
        commit = partial(runs.commit_round, run=run, number=1, params="q", strategy_state="s", best={}, record=row, now=START)  # fmt: skip
        database.write(partial(_commit_first_round, run=run, commit=commit)).result()


def _commit_first_round(connection: Any, *, run: str, commit: Callable[[Any], object]) -> None:
    _open_round(connection, run)
    commit(connection)


def _open_round(connection: Any, run: str) -> None:
    values = {
        "run": run,
        "number": 1,
        "state": "closed",
        "base": "b",
        "wanted": 1,
        "population": 2,
        "expected": {},
    }
    times = {"started_at": START, "deadline_at": START}
    connection.execute(tables.rounds.insert().values(**values, **times))


@pytest.mark.usefixtures("two_runs")
def test_runs_of_a_coordinator_are_listed_with_those_in_folders(tmp_path: Path, remote: Fedloop) -> None:
    make_folder(tmp_path / "runs" / "mine", TINY)
    rows = json.loads(remote("runs", "list", "--json").stdout)
    shown = {row["id"]: (row["name"], row["round"], row["test_accuracy"], row["r2"]) for row in rows}
    assert shown == {
        "runs/mine": ("synthetic", 1, 0.75, None),
        "0aa11111-x": ("digits", 0, None, None),
        "0bb33333-x": ("pumps", 1, 0.75, None),
        "0cc44444-x": ("prices", 1, None, 0.25),
    }
    listed = {line.split()[0]: line for line in remote("runs", "list").stdout.splitlines()}
    assert "accuracy 0.7500" in listed["0bb33333"] and "R2 0.2500" in listed["0cc44444"]


@pytest.mark.usefixtures("two_runs")
def test_r2_on_the_coordinators_own_rows_comes_before_that_of_devices(coordinator: Door) -> None:
    def judged(connection: Any) -> Any:
        with connection.begin_nested() as undone:
            runs.judge(connection, "0cc44444-x", {"final": {"metrics": {"r2": 0.5}}})
            found = runs.scores(connection, ["0aa11111-x", "0cc44444-x"])
            undone.rollback()
        return found

    expected = {"0cc44444-x": {"test_accuracy": None, "r2": 0.5}}
    assert coordinator.services.database.write(judged).result() == expected


def test_a_finished_run_that_predicts_quantities_is_listed_with_r2(tmp_path: Path, fedloop: Fedloop) -> None:
    folder = make_folder(tmp_path / "runs" / "prices", TINY, rounds=0)
    lines = run_files.open_lines(folder, None)
    run_files.append_round(lines["rounds.csv"], replace(RECORD, test_accuracy=None))
    for file in lines.values():
        file.close()
    report = {"experiment": TINY, "final": {"metrics": {"r2": 0.8125}}}
    (folder / "report.json").write_text(json.dumps(report))
    (row,) = json.loads(fedloop("runs", "list", "--json").stdout)
    assert (row["state"], row["test_accuracy"], row["r2"]) == ("finished", None, 0.8125)
    assert "R2 0.8125" in fedloop("runs", "list").stdout


@pytest.mark.usefixtures("two_runs")
def test_a_run_on_devices_is_shown_with_each_device(
    remote: Fedloop, coordinator: Door, tmp_path: Path
) -> None:
    device = Device(tmp_path, "pump-7")
    assert coordinator.enrol(device).status_code == 200
    shown = remote("runs", "show", "0bb").stdout
    assert "0bb33333  pumps: running, round 1 of 2\nrun 0bb33333-x\ntest accuracy 0.7500" in shown
    assert "notice: a notice" in shown
    assert f"pump-7 ({device.id[:8]}): " in shown
    document = json.loads(remote("runs", "show", "pumps", "--json").stdout)
    assert [each["name"] for each in document["devices"]] == ["pump-7"]
    logged = remote("runs", "logs", "0bb").stdout.splitlines()
    assert [line.split()[2] for line in logged] == ["run_created", "run_started", "round_committed"]


@pytest.mark.usefixtures("two_runs")
def test_a_run_on_devices_is_cancelled_and_resumed_by_the_beginning_of_its_id(remote: Fedloop) -> None:
    assert remote("runs", "cancel", "0AA").stdout == "run 0aa11111 is cancelled\n"
    assert "cancelled" in remote("runs", "show", "0aa").stdout
    assert remote("runs", "logs", "0aa", "--follow").stdout.splitlines()[-1].endswith("run_cancelled")
    assert_refused(remote("runs", "extend", "0bb", "--rounds", "9"), "on devices", "add-run 0bb33333")
    assert_refused(remote("runs", "resume", "0aa", "--set", "federation.rounds=9"), "--set")
    assert remote("runs", "resume", "0aa").stdout == "run 0aa11111 goes on behind round 0\n"
    assert "0aa11111  digits: running" in remote("runs", "show", "0aa").stdout
    assert_refused(remote("runs", "cancel", "zzz"), "matches 'zzz'")
