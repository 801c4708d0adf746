"""A Keras model of a user's, of which nobody told us anything: federated, scored and released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_client.wire import arrays
from tests.support.cli import assert_refused, options, report_of, run_cli

pytestmark = pytest.mark.slow

MINE = """
import keras
from keras import layers

def build(input_shape, classes, width=8):
    return keras.Sequential([
        keras.Input(input_shape),
        layers.Reshape((*input_shape, 1)),
        layers.Conv2D(width, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(classes),
    ])
"""
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
    asked = [*SETTINGS, "federation.runtimes={litert=1}"]
    done = run_cli("simulate", "--out", "run", *options(asked), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_litert_clients_train_it_from_its_own_initialisation(run: Path) -> None:
    report: dict[str, Any] = report_of(run)

    assert report["runtimes"] == {"litert": 4} and report["rejections"] == {}
    assert report["start"]["test_accuracy"] < 0.4 < 0.8 < report["final"]["test_accuracy"]
    assert set(arrays.read(run / "model.safetensors")) == {
        f"{layer}.{weight}" for layer in ("conv2d", "dense") for weight in ("kernel", "bias")
    }


def test_torch_clients_are_refused_with_what_to_do(folder: Path) -> None:
    done = run_cli("simulate", "--out", "torch", *options(SETTINGS), cwd=folder)
    assert_refused(done, "federation.runtimes", "torch", "mine:build", "Keras model", "{litert=1}")
