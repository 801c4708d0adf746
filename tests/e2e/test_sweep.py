"""`fedloop sweep`: killed and resumed, one table and one plot."""

from __future__ import annotations

import csv
import json
import signal
import struct
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.support.cli import assert_refused, options, report_of, run_cli, run_here, started
from tests.support.require import require

SMALL = options(
    (
        "data.dataset=synthetic(shape=[4], classes=2, samples=60)",
        "model.name=logreg",
        "federation.clients=3",
        "federation.rounds=3",
        "federation.runtimes={torch=1}",
        "local.epochs=1",
        "simulation.workers=1",
    )
)
OVER = ["--over", "strategy.name=fedavg,fedadam", "--seeds", "2"]


@pytest.mark.slow
def test_a_killed_sweep_keeps_finished_runs_and_resumes_the_others(tmp_path: Path) -> None:
    if find_spec("mlflow") is None:
        require("mlflow", "it is not installed")
    tracked = "--mlflow", f"sqlite:///{tmp_path / 'mlflow.db'}"
    out = tmp_path / "sweep"
    with started("sweep", *SMALL, *OVER, "--jobs", "2", "--out", out) as run:
        assert run.reaches(lambda: any(out.glob("*/report.json"))), run.errors()
        run.send(signal.SIGKILL)
        run.ended()
        assert run.all_gone()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/report.json")}
    assert not (out / "sweep.json").exists()

    done = run_cli("sweep", "--resume", out, "--jobs", "2", "--json", *tracked, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    document = json.loads(done.stdout)
    assert document == {"out": str(out), **json.loads((out / "sweep.json").read_text())}
    for row, line in zip(document["rows"], csv.DictReader((out / "sweep.csv").open(newline="")), strict=True):
        reports = [report_of(out / folder) for folder in row["folders"]]
        assert [each["experiment"]["seed"] for each in reports] == [7, 8] == row["seeds"]
        assert {each["experiment"]["strategy"]["name"] for each in reports} == {
            row["values"]["strategy.name"]
        }
        losses = [each["final"]["test_loss"] for each in reports]
        assert row["figures"]["test_loss"]["mean"] == fmean(losses) == float(line["test_loss_mean"])
        assert row["figures"]["test_loss"]["std"] == stdev(losses) == float(line["test_loss_std"])
        assert (line["strategy.name"], line["seeds"]) == (row["values"]["strategy.name"], "2")
    header = (out / "sweep.png").read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert header.startswith(b"\x89PNG\r\n\x1a\n") and width > 600 and height > 300

    _require_tracked(tracked[1], out, document)
    _refuse_all_updates(out / document["rows"][1]["folders"][0])
    again = run_here("sweep", "--resume", out)
    assert again.returncode == 1 and "fedadam" in again.stdout
    _, found, unchanged = again.stderr.partition("no round changed the model of these runs")
    assert found and unchanged.splitlines()[-1].strip() == document["rows"][1]["folders"][0]
    assert len(unchanged.split("/:")[1].split()) == 1


@pytest.mark.extended
@pytest.mark.slow
def test_three_strategies_two_rates_and_three_seeds_are_one_table_and_one_plot(tmp_path: Path) -> None:
    """Killed after the first runs and resumed; MLflow has all eighteen."""
    if find_spec("mlflow") is None:
        require("mlflow", "it is not installed")
    tracked = "--mlflow", f"sqlite:///{tmp_path / 'mlflow.db'}"
    over = ["--over", "strategy.name=fedavg,fedadam,fedyogi", "--over", "local.lr=0.05,0.1", "--seeds", "3"]
    out = tmp_path / "sweep"
    with started("sweep", *SMALL, *over, "--jobs", "2", "--out", out) as run:
        assert run.reaches(lambda: len(list(out.glob("*/report.json"))) >= 2), run.errors()
        run.send(signal.SIGKILL)
        run.ended()
        assert run.all_gone()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/report.json")}

    done = run_cli("sweep", "--resume", out, "--jobs", "2", "--json", *tracked, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    document = json.loads((out / "sweep.json").read_text())
    combinations = {tuple(row["values"].values()) for row in document["rows"]}
    assert combinations == {
        (name, rate) for name in ("fedavg", "fedadam", "fedyogi") for rate in ("0.05", "0.1")
    }
    assert [row["n"] for row in document["rows"]] == [3] * 6
    assert len(list(csv.DictReader((out / "sweep.csv").open(newline="")))) == 6
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    _require_tracked(tracked[1], out, document)


def _require_tracked(uri: str, out: Path, document: dict[str, Any]) -> None:
    """Requires MLflow to have the sweep with its table and plot, and each run once below it, with its figures by round."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(document["name"])
    runs = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    parent = runs.pop(out.name)
    assert {"sweep.csv", "sweep.png"} <= {each.path for each in client.list_artifacts(parent.info.run_id)}
    assert sorted(runs) == sorted(folder for row in document["rows"] for folder in row["folders"])
    for name, run in runs.items():
        report = report_of(out / name)
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id and run.info.status == "FINISHED"
        assert run.data.params["strategy.name"] == report["experiment"]["strategy"]["name"]
        history = client.get_metric_history(run.info.run_id, "test_loss")
        assert [each.value for each in history] == [
            each["test_loss"] for each in (report["start"], *report["rounds"])
        ]


def _refuse_all_updates(run: Path) -> None:
    """Makes the folder of a run that of one whose clients sent nothing usable."""
    report = report_of(run)
    report["rounds"] = [{**row, "accepted": 0, "rejected": row["accepted"]} for row in report["rounds"]]
    (run / "report.json").write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--over", "strategy.name=fedavg,fedadan", "--out", "x/sweep"],
            ["strategy.name=fedadan", "fedadam"],
        ),
        (["--over", "local.lr=fast,0.1"], ["local.lr=fast", "number"]),
        (["--resume", "nowhere"], ["--resume nowhere", "no sweep"]),
        (["--resume", "nowhere", "--seeds", "2"], ["--resume", "--seeds"]),
        (["none.toml"], ["none.toml", "no such"]),
    ],
)
def test_a_refused_sweep_starts_nothing_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], named: list[str]
) -> None:
    assert_refused(run_here("sweep", *arguments, cwd=tmp_path), *named)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    wrong = [
        "--set",
        "data.dataset=csv",
        "--set",
        "data.path=no.csv",
        "--set",
        "federation.runtimes={torch=1}",
    ]
    done = run_here("sweep", *wrong, "--seeds", "2", "--out", "x/sweep", cwd=tmp_path)
    assert_refused(done, "1-run-seed", "no.csv")
    assert list(tmp_path.iterdir()) == []
