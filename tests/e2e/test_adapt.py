"""Fine-tuning on a frozen backbone, by simulated clients and by daemons: better than what was shipped, for few bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator.demos.demo_fleet import client_data
from coordinator.demos.local_fleet import local_fleet
from coordinator.experiments import experiment as experiments
from coordinator.operator import run_follower
from coordinator.reports.progress import Quiet
from edge_client.files import file_sha256
from edge_client.wire import arrays
from models import adaptation
from tests.support.cli import CACHE, run_cli, run_here
from tests.support.long import extended
from tests.support.shipped import digits_model, shipped, written

pytestmark = pytest.mark.slow

RESNET: dict[str, Any] = {"name": "resnet8", "norm": "batch"}
MLP: dict[str, Any] = {"name": "mlp", "hidden": [256, 128]}
CONFIG = {"runtimes": ["litert"], "data": {"digits": {"kind": "numpy", "path": "data.npz"}}}


@pytest.fixture(autouse=True)
def kept_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOP_CACHE_DIR", str(CACHE))


@pytest.mark.parametrize(
    ("model", "steps", "adapt", "trained"),
    [
        (MLP, 15, "lora(1, 8)", {"fc.weight", "fc.bias", "hidden.0.weight", "hidden.1.weight"}),
        *extended((RESNET, 60, "head", {"fc.weight", "fc.bias"})),
    ],
)
def test_few_params_trained_federatedly_improve_the_model_for_a_twentieth_of_the_bytes(
    model: dict[str, Any], steps: int, adapt: str, trained: set[str], tmp_path: Path
) -> None:
    init = shipped_in(tmp_path, model, steps)
    found = fedloop.simulate(experiment(init, model, rounds=4, adapt=adapt), out=tmp_path / "run")

    assert found.accuracy > found.report["start"]["test_accuracy"] + 0.005
    full = sum(value.nbytes for value in arrays.read(init).values())
    assert all(20 * up(row) <= 2 * 5 * full for row in found.rounds)
    begun = adaptation.dequantize_backbone(adaptation.quantize_backbone(arrays.read(init)))
    assert found.params.keys() == begun.keys()
    assert {name for name in begun if not np.array_equal(found.params[name], begun[name])} == trained


@pytest.mark.extended
def test_daemons_train_a_head_and_the_model_they_end_with_can_be_compressed(tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    document = experiment(shipped_in(models, MLP, 15), MLP, rounds=4, adapt="head")
    document["federation"] |= {"clients": 3, "clients_per_round": 3}
    parts = client_data(experiments.resolve(document, "test"))
    with local_fleet(tmp_path / "fleet", ["--allow-path", str(models)]) as fleet:
        for number, share in enumerate(parts):
            fleet.add(f"device-{number}", CONFIG, share).start()
        run = fleet.client.post("/runs", {"experiment": document})
        out = tmp_path / "run"
        report = run_follower.follow(fleet.client, run["id"], out, Quiet())
        assert set(fleet.stop().values()) == {0}

    assert report["final"]["test_accuracy"] > report["start"]["test_accuracy"]
    assert report["final"]["model_sha256"] == file_sha256(out / "model.safetensors")
    full = sum(value.nbytes for value in arrays.read(out / "model.safetensors").values())
    assert all(20 * up(row) <= 2 * 3 * full for row in report["rounds"])
    done = run_cli("compress", out, "--out", tmp_path / "compressed")
    assert done.returncode == 0, done.stderr


def test_unadaptable_models_are_refused_before_anything_runs(tmp_path: Path) -> None:
    sets = ["model.adapt=lora", "federation.runtimes={tensorflow=1}"]
    done = run_here(
        "simulate", "--out", tmp_path / "run", *(part for each in sets for part in ("--set", each))
    )

    assert done.returncode == 2
    for words in ("expected head, lora(r)", "model.init", "trains in: litert, torch"):
        assert words in done.stderr


def shipped_in(folder: Path, model: dict[str, Any], steps: int = 60) -> Path:
    return written(shipped(digits_model(**model), steps=steps), folder / "init.safetensors")


def experiment(init: Path, model: dict[str, Any], rounds: int, adapt: str) -> dict[str, Any]:
    return {
        "data": {"dataset": "digits", "partition": "dirichlet(0.3)"},
        "model": {**model, "init": str(init), "adapt": adapt},
        "federation": {"clients": 10, "clients_per_round": 5, "rounds": rounds, "runtimes": {"litert": 1}},
        "local": {"epochs": 2, "lr": 0.05},
        "simulation": {"workers": 1},
    }


def up(row: dict[str, Any]) -> int:
    """Bytes of a round, both ways."""
    return int(row["bytes_up"] + row["bytes_down"])
