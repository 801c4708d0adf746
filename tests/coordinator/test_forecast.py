"""A forecast is right where it can be: bytes to the byte, time as far as the machine is the same; bad input is refused as by the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.commands.cli import app
from coordinator.experiments import experiment as experiments
from coordinator.experiments.schema import Experiment
from coordinator.reports.progress import Progress, Quiet
from coordinator.rounds.records import RoundRecord
from coordinator.runs import simulation
from coordinator.runs.forecast import calibration, forecast
from coordinator.runs.forecast.calibration import Calibration
from tests.support.long import extended

SMALL = ["model.name=mlp", "model.hidden=[8]", "federation.runtimes={torch=1}", "simulation.workers=1"]


def record(number: int, seconds: float, selected: int = 10, silent: int = 0, up: int = 1000) -> RoundRecord:
    return RoundRecord(
        round=number,
        selected=selected,
        accepted=selected - silent,
        rejected=0,
        silent=silent,
        train_loss=1.0,
        test_loss=1.0,
        test_accuracy=0.5,
        client_accuracy_min=None,
        client_accuracy_median=None,
        client_accuracy_max=None,
        bytes_up=up,
        bytes_down=100 * selected,
        seconds=seconds,
        rejections={},
        simulated_seconds=2.0,
    )


def test_rounds_that_score_the_model_are_counted_apart() -> None:
    loaded = experiments.load(None, ["federation.rounds=100", "evaluation.every=10"])
    measured = Calibration(
        20,
        [record(1, 9.0), record(2, 1.0), record(3, 1.0), record(4, 3.0)],
        [False, False, False, True],
        5.0,
        2.0,
        10**6,
    )
    predicted = forecast.predict(loaded, measured)
    assert predicted.rounds_seconds == pytest.approx(90 * 1.0 + 10 * 3.0)  # the first round does not count
    assert predicted.seconds == pytest.approx(5.0 + 120.0 + 2.0)
    assert predicted.alone_seconds == 0
    assert (predicted.bytes_up, predicted.bytes_down) == (100 * 1000, 100 * 1000)
    assert predicted.simulated_seconds == pytest.approx(200.0)


def test_bytes_of_a_client_count_those_who_answer() -> None:
    loaded = experiments.load(None, ["federation.rounds=2", "simulation.local_baseline=on"])
    measured = Calibration(20, [record(1, 1.0), record(2, 1.0, silent=5, up=1000)], [True, True], 0.0, 0.0, 1)
    predicted = forecast.predict(loaded, measured)
    assert predicted.client_bytes_up == pytest.approx(200)
    assert predicted.client_bytes_down == pytest.approx(100)
    assert predicted.alone_seconds == pytest.approx(2 * 1.0 / 5 * 20)


@pytest.mark.slow  # starts worker processes
@pytest.mark.parametrize("strategy", ["fedavg", *extended("scaffold")])
def test_prediction_of_a_finished_run_names_its_bytes(strategy: str, tmp_path: Path) -> None:
    loaded = experiments.load(
        None, [*SMALL, "federation.rounds=6", f"strategy.name={strategy}", "simulation.speed_spread=0.5"]
    )
    out = tmp_path / "run"
    report = simulation.simulate(loaded, out, simulation.Environment())
    result = CliRunner().invoke(app, ["plan", str(out), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    predicted, happened = document["predicted"], document["happened"]
    assert predicted["bytes_down"] == happened["bytes_down"] == report["bytes_down"]
    assert predicted["bytes_up"] == pytest.approx(report["bytes_up"], rel=1e-3)  # headers differ by digits
    assert (predicted["rounds"], predicted["clients"]) == (happened["rounds"], happened["clients"]) == (6, 20)
    assert predicted["memory_bytes"] > 10**7
    assert 0 < predicted["rounds_seconds"] < predicted["seconds"]


@pytest.mark.slow  # starts worker processes
def test_calibration_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loaded = experiments.load(None, [*SMALL, "federation.rounds=2", "record=trace.csv"])

    def simulate(short: Experiment, out: Path, progress: Progress) -> Mapping[str, Any]:
        return simulation.simulate(short, out, simulation.Environment(progress=progress))

    measured = calibration.calibrate(loaded, simulate, Quiet())
    assert [each.round for each in measured.rounds] == [1, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "local.lr=-1"], "local.lr"),
        (["missing.toml"], "no such experiment file"),
        (["."], "report.json"),
    ],
)
def test_what_the_run_would_refuse_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert message in str(result.exception or result.output)


def test_run_on_devices_is_not_planned_anew(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"run": "abc"}')
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert "on devices" in str(result.exception)
