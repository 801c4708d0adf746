"""The Keras model of the guide, as a user brings it: federated, scored and released."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.demos.demo_fleet import client_data
from coordinator.demos.local_fleet import local_fleet
from coordinator.experiments import experiment as experiments
from coordinator.operator import run_follower
from coordinator.reports.progress import Quiet
from edge_client.files import file_sha256
from edge_client.wire import arrays
from tests.support.cli import assert_refused, options, report_of, run_cli, run_here

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "own-model.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
MINE = next(each for each in BLOCKS if "keras.Sequential" in each)
SETTINGS = [
    "model.name=mine:build",
    "model.width=6",
    "federation.clients=4",
    "federation.rounds=4",
    "simulation.workers=1",
    "data.partition=iid",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's working directory."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A finished run of LiteRT clients."""
    requested = [*SETTINGS, "federation.runtimes={litert=1}"]
    done = run_cli("simulate", "--out", "run", *options(requested), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.extended
def test_litert_clients_train_it_from_its_own_initialisation(run: Path) -> None:
    report: dict[str, Any] = report_of(run)

    assert report["runtimes"] == {"litert": 4} and report["rejections"] == {}
    assert report["start"]["test_accuracy"] < 0.4 < 0.8 < report["final"]["test_accuracy"]
    assert set(arrays.read(run / "model.safetensors")) == {
        f"{layer}.{weight}" for layer in ("conv2d", "dense") for weight in ("kernel", "bias")
    }


@pytest.mark.extended
def test_torch_clients_are_refused_with_what_to_do(folder: Path) -> None:
    done = run_here("simulate", "--out", "torch", *options(SETTINGS), cwd=folder)
    assert_refused(done, "federation.runtimes", "torch", "mine:build", "Keras model", "{litert=1}")


@pytest.mark.extended
def test_the_result_of_a_run_is_released_as_integers(run: Path, folder: Path) -> None:
    requested = [
        "--name",
        "digits",
        "--precision",
        "static-int8",
        "--max-accuracy-drop",
        "0.03",
        "--out",
        "release",
    ]
    done = run_cli("export", run, *requested, "--json", cwd=folder)

    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["precision"] == "static-int8" and report["golden"]["asked_of"] == "float model"
    assert "litert" in report["runtimes"]
    assert report["accuracy"] > report["float_accuracy"] - 0.02 > 0.75
    assert report["bytes"] == (folder / "release" / "model.tflite").stat().st_size
    left = {path.name for path in (folder / "release").iterdir()}
    assert left == {"manifest.json", "model.tflite", "report.json"}


@pytest.mark.extended
def test_daemons_train_it_as_any_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # where `fedloop serve` runs, and finds mine.py
    document = {
        "data": {"dataset": "digits", "partition": "iid"},
        "model": {"name": "mine:build", "width": 6},
        "federation": {"clients": 2, "clients_per_round": 2, "rounds": 2, "runtimes": {"litert": 1}},
    }
    config = {"runtimes": ["litert"], "data": {"digits": {"kind": "numpy", "path": "data.npz"}}}
    with local_fleet(tmp_path, ["--allow-code", "mine:build"]) as fleet:
        for number, share in enumerate(client_data(experiments.resolve(document, "test"))):
            fleet.add(f"device-{number}", config, share).start()
        run = fleet.client.post("/runs", {"experiment": document})
        report = run_follower.follow(fleet.client, run["id"], tmp_path / "run", Quiet())
        assert set(fleet.stop().values()) == {0}

    assert [row["accepted"] for row in report["rounds"]] == [2, 2]
    assert report["final"]["test_accuracy"] > report["start"]["test_accuracy"] + 0.2
    assert report["final"]["model_sha256"] == file_sha256(tmp_path / "run" / "model.safetensors")


def test_a_keras_file_needs_rows_to_be_tried_on(folder: Path) -> None:
    (folder / "net.keras").write_bytes(b"")
    done = run_here("export", "net.keras", "--name", "digits", "--out", "none", cwd=folder)
    assert_refused(done, "net.keras", "--data is missing", "digits")
