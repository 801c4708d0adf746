"""Fine-tuning on a frozen backbone, by simulated clients and by daemons: better than what was shipped, for few bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator import experiment as experiments
from coordinator import following
from coordinator.demo_fleet import shares
from coordinator.local_fleet import local_fleet
from coordinator.progress import Quiet
from edge_client.wire import arrays
from models import adaptation
from tests.support.cli import CACHE, run_cli
from tests.support.shipped import digits_model, shipped, written

pytestmark = pytest.mark.slow

OPTIONS = {"name": "resnet8", "norm": "batch"}
SPEC = digits_model(**OPTIONS)
CONFIG = {"runtimes": ["litert"], "data": {"digits": {"kind": "numpy", "path": "data.npz"}}}


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(shipped(SPEC), tmp_path_factory.mktemp("shipped") / "init.safetensors")


@pytest.fixture(autouse=True)
def kept_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOP_CACHE_DIR", str(CACHE))


def test_a_head_trained_federatedly_improves_the_model_for_a_twentieth_of_the_bytes(
    init: Path, tmp_path: Path
) -> None:
    head = fedloop.simulate(experiment(init, rounds=4, adapt="head"), out=tmp_path / "head")
    trains_all = experiment(init, rounds=1)
    trains_all["federation"]["runtimes"] = {"torch": 1}  # sends what LiteRT does, and needs no conversion
    full = fedloop.simulate(trains_all, out=tmp_path / "full")

    assert head.accuracy > head.report["start"]["test_accuracy"] + 0.005
    assert all(20 * up(row) <= up(full.rounds[0]) for row in head.rounds)
    begun = adaptation.restored(adaptation.backbone(arrays.read(init)))
    assert head.params.keys() == begun.keys()
    moved = {name for name in begun if not np.array_equal(head.params[name], begun[name])}
    assert moved == {"fc.weight", "fc.bias"}


def test_daemons_train_a_head_and_the_model_they_end_with_can_be_compressed(
    init: Path, tmp_path: Path
) -> None:
    document = experiment(init, rounds=6, adapt="head")
    document["federation"] |= {"clients": 3, "clients_per_round": 3}
    parts = shares(experiments.resolve(document, "test"))
    with local_fleet(tmp_path) as fleet:
        for number, share in enumerate(parts):
            fleet.add(f"device-{number}", CONFIG, share).start()
        run = following.submit(fleet.client, document, [])
        out = tmp_path / "run"
        report = following.follow(fleet.client, run["id"], out, Quiet())
        assert set(fleet.stop().values()) == {0}

    assert report["final"]["test_accuracy"] > report["start"]["test_accuracy"]
    assert report["final"]["model_sha256"] == arrays.sha256_of(out / "model.safetensors")
    whole = sum(value.nbytes for value in arrays.read(out / "model.safetensors").values())
    assert all(20 * up(row) <= 2 * 3 * whole for row in report["rounds"])
    done = run_cli("compress", out, "--out", tmp_path / "compressed")
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_adapted_is_refused_before_anything_runs(tmp_path: Path) -> None:
    sets = ["model.adapt=lora", "federation.runtimes={tensorflow=1}"]
    done = run_cli(
        "simulate", "--out", tmp_path / "run", *(part for each in sets for part in ("--set", each))
    )

    assert done.returncode == 2
    for words in ("expected head, lora(r)", "model.init", "trains in: litert, torch"):
        assert words in done.stderr


def experiment(init: Path, rounds: int, **model: Any) -> dict[str, Any]:
    return {
        "data": {"dataset": "digits", "partition": "dirichlet(0.3)"},
        "model": {**OPTIONS, "init": str(init), **model},
        "federation": {"clients": 10, "clients_per_round": 5, "rounds": rounds, "runtimes": {"litert": 1}},
        "local": {"epochs": 2, "lr": 0.05},
        "simulation": {"workers": 1},
    }


def up(row: dict[str, Any]) -> int:
    """Bytes of a round, both ways."""
    return int(row["bytes_up"] + row["bytes_down"])
