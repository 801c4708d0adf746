"""A finished run in MLflow and TensorBoard, read back by their own programs."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator import extras
from coordinator.errors import RunInterrupted, UserError
from coordinator.reports.trackers import Trackers
from tests.support.cli import assert_refused, run_here
from tests.support.require import require

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ROUNDS = [
    {"round": 1, "test_loss": 0.7, "test_accuracy": 0.6, "train_loss": 0.9, "seconds": 2.0, "rejections": {}},
    {
        "round": 2,
        "test_loss": None,
        "test_accuracy": 0.8,
        "train_loss": 0.5,
        "seconds": 3.0,
        "rejections": {},
    },
]
REPORT: dict[str, Any] = {
    "experiment": {"name": "digits", "local": {"lr": 0.1}, "federation": {"runtimes": {"torch": 1.0}}},
    "start": {"test_loss": 2.3, "test_accuracy": 0.1},
    "rounds": ROUNDS,
    "final": {"test_loss": 0.4, "test_accuracy": 0.8, "test_rows": 5, "model_sha256": "0" * 64},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run in a sweep."""
    folder = tmp_path / "sweep" / "it's 1"
    folder.mkdir(parents=True)
    for name in ("report.json", "model.safetensors", ".lock"):
        (folder / name).write_text(json.dumps(REPORT))
    for name in ("plan.json", "sweep.csv", "sweep.json", "sweep.png"):
        (folder.parent / name).write_text("")
    return folder


@pytest.fixture
def mlflow() -> None:
    if find_spec("mlflow") is None:
        require("mlflow", "it is not installed")


@pytest.fixture
def tensorboard() -> None:
    if find_spec("tensorboard") is None:
        require("tensorboard", "it is not installed")


@pytest.mark.usefixtures("mlflow")
@pytest.mark.slow
def test_mlflow_reads_back_what_was_copied(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    trackers = Trackers(mlflow=uri)
    trackers.check()
    for _ in range(2):  # again after a resume
        trackers.copy_run(run, REPORT, NOON, run.parent)
        trackers.copy_sweep(run.parent, "digits")
    assert capfd.readouterr() == ("", "")

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    parent, child = sorted(
        client.search_runs([experiment.experiment_id]), key=lambda each: each.info.run_name != "sweep"
    )
    assert (parent.info.run_name, child.info.run_name) == ("sweep", "it's 1")
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {parent.info.status, child.info.status} == {"FINISHED"}
    assert child.data.params == {"name": "digits", "local.lr": "0.1", "federation.runtimes.torch": "1.0"}
    history = client.get_metric_history(child.info.run_id, "test_accuracy")
    ended = int(NOON.timestamp() * 1000)
    assert [(each.step, each.value, each.timestamp) for each in history] == [
        (0, 0.1, ended - 5000), (1, 0.6, ended - 3000), (2, 0.8, ended),
    ]  # fmt: skip
    assert [each.step for each in client.get_metric_history(child.info.run_id, "test_loss")] == [0, 1]
    assert child.data.metrics["final.test_loss"] == 0.4
    assert [each.path for each in client.list_artifacts(child.info.run_id)] == [
        "model.safetensors",
        "report.json",
    ]
    copied = client.download_artifacts(child.info.run_id, "report.json", str(tmp_path))
    assert json.loads(Path(copied).read_text()) == REPORT
    assert "sweep.png" in [each.path for each in client.list_artifacts(parent.info.run_id)]


@pytest.mark.usefixtures("tensorboard")
@pytest.mark.slow
def test_tensorboard_reads_back_what_was_copied(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorBoard then reads without TensorFlow, whose import takes longer than the rest.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for _ in range(2):
        Trackers(tensorboard=tmp_path / "events").copy_run(run, REPORT, NOON, run.parent)
    (path,) = [each for each in (tmp_path / "events").rglob("*") if each.is_file()]
    assert path.parent == tmp_path / "events" / "sweep" / "it's 1"
    events = list(EventFileLoader(str(path)).Load())
    assert events[0].file_version == "brain.Event:2"
    found = {
        (value.tag, event.step): round(value.tensor.float_val[0], 6)
        for event in events
        for value in event.summary.value
    }
    assert found["test_accuracy", 0] == 0.1
    assert {key: found[key] for key in found if key[0] == "test_loss"} == {
        ("test_loss", 0): 2.3,
        ("test_loss", 1): 0.7,
    }
    assert events[-1].wall_time == NOON.timestamp()


def test_a_tracker_that_is_not_installed_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(extras.PARTS, "MLflow", (("no-such-distribution",), "mlflow"))
    done = run_here("simulate", "--mlflow", "sqlite:///x.db", cwd=tmp_path)
    assert_refused(done, "--mlflow needs no-such-distribution", "pip install 'fedloop[mlflow]'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("mlflow")
@pytest.mark.slow
def test_a_store_that_mlflow_cannot_use_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--mlflow nonsense://x"):
        Trackers(mlflow="nonsense://x").check()


def test_a_tracker_that_fails_says_that_the_run_is_finished(run: Path, tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file")
    trackers = Trackers(tensorboard=tmp_path / "events")
    with pytest.raises(RunInterrupted, match="is finished, but a tracker failed"):
        trackers.copy_run(run, REPORT, NOON)


PRETRAINED: dict[str, Any] = {
    "config": {"name": "plays", "train": {"lr": 0.1, "batch_size": 4}},
    "final": {"test_loss": 1.5, "test_accuracy": None, "parameters": 7, "model_sha256": "1" * 64},
    "validation": {"rows": 3, "last_loss": 1.75, "best_loss": 1.5, "best_step": 1, "result_step": 2},
}
STEPS = [
    {"step": 1, "loss": 3.0, "lr": 0.1, "rows_per_second": 2.0, "plan": "dp=1", "restart": 0},
    {"step": 2, "loss": 2.0, "lr": 0.1, "rows_per_second": 4.0, "restart": 0, "validation_loss": 1.75},
]


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """The folder of a finished pretraining."""
    folder = tmp_path / "plays"
    folder.mkdir()
    (folder / "curve.jsonl").write_text("".join(json.dumps(step) + "\n" for step in STEPS))
    return folder


@pytest.mark.usefixtures("mlflow")
@pytest.mark.slow
def test_mlflow_has_the_steps_of_a_pretraining(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for _ in range(2):
        Trackers(mlflow=uri).copy_pretraining(pretrained, PRETRAINED, NOON)

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("plays").experiment_id])  # type: ignore[union-attr]
    assert run.data.params == {"name": "plays", "train.lr": "0.1", "train.batch_size": "4"}
    ended = int(NOON.timestamp() * 1000)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value, each.timestamp) for each in history] == [
        (1, 3.0, ended - 1000),
        (2, 2.0, ended),
    ]
    assert [each.step for each in client.get_metric_history(run.info.run_id, "validation_loss")] == [2]
    assert run.data.metrics["final.test_loss"] == run.data.metrics["final.best_loss"] == 1.5


@pytest.mark.usefixtures("tensorboard")
@pytest.mark.slow
def test_tensorboard_has_the_steps_of_a_pretraining(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    Trackers(tensorboard=tmp_path / "events").copy_pretraining(pretrained, PRETRAINED, NOON)

    (path,) = (tmp_path / "events" / "plays").iterdir()
    events = list(EventFileLoader(str(path)).Load())
    found = {
        (value.tag, event.step): round(value.tensor.float_val[0], 6)
        for event in events
        for value in event.summary.value
    }
    assert events[0].file_version == "brain.Event:2"
    assert found["loss", 1] == 3.0 and found["validation_loss", 2] == 1.75
    assert ("validation_loss", 1) not in found
