"""A model is pretrained, fine-tuned by adapters on other data, and handed over: to serving, and to federated training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.demos.fedloop_commands import FedloopCommands
from coordinator.demos.local_fleet import local_fleet
from edge_client.files import file_sha256
from models import zoo
from models.job import read_params
from tests.support.cli import run_cli, run_here

pytestmark = pytest.mark.slow

LENGTH, VOCAB = 12, 20
SIZES = {"width": 16, "layers": 2, "heads": 2}
MODEL = ("model.name=gpt", *(f"model.{key}={value}" for key, value in SIZES.items()))


def test_a_fine_tuned_model_is_served_and_federated(tmp_path: Path) -> None:
    _pretrain(tmp_path, "base", "general", *MODEL)
    shown = _pretrain(
        tmp_path, "tuned", "special", "model.init=base", "model.adapt=lora(4, 8)", plan="tp=2,zero=3"
    )

    report = _report(tmp_path / "tuned")
    assert report["first_loss"] > report["final"]["test_loss"]
    assert "of 10," in shown or " of " in shown
    trained = read_params(tmp_path / "tuned" / "adapters.safetensors")
    assert report["adapters"]["adapt"] == "lora(4, 8)"
    assert report["adapters"]["parameters"] == sum(value.size for value in trained.values())
    assert report["lineage"]["parent"]["sha256"] == file_sha256(tmp_path / "base" / "model.safetensors")
    same = _report(tmp_path / "base")["final"]["parameters"]
    assert report["final"]["parameters"] == same  # the products are in the weights

    simulated = {adapt: _simulate(tmp_path, adapt) for adapt in ("", "lora(2)")}
    loss = report["final"]["test_loss"]
    assert simulated[""]["start"]["test_loss"] == pytest.approx(loss, abs=1e-5)
    # an adapting run rounds the frozen matrices to 8 bits
    assert simulated["lora(2)"]["start"]["test_loss"] == pytest.approx(loss, abs=0.01)
    for each in simulated.values():
        assert each["final"]["test_loss"] < each["start"]["test_loss"]


@pytest.mark.extended
def test_a_registered_version_of_a_fine_tuned_model_answers_programs(tmp_path: Path) -> None:
    _pretrain(tmp_path, "base", "general", *MODEL)
    _pretrain(tmp_path, "tuned", "special", "model.init=base", "model.adapt=lora(4)")
    with local_fleet(tmp_path / "fleet") as fleet:
        fedloop = FedloopCommands(fleet, tmp_path, lambda line: None)
        fedloop("model", "add", "tuned", "--name", "tuned")
        fedloop("model", "export", "tuned:1", "--out", "exported")
    exported = read_params(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == read_params(tmp_path / "tuned" / "model.safetensors").keys()
    rows = _rows("special")[2][:4]
    module = zoo.get("gpt", input_shape=(LENGTH,), classes=VOCAB, **SIZES).build(0).eval()
    module.load_state_dict({name: torch.from_numpy(value) for name, value in exported.items()})
    with torch.no_grad():
        answers = module(torch.from_numpy(rows)).argmax(-1).numpy()
    assert (answers[:, 1:] == (rows[:, 1:] + 3) % VOCAB).mean() > 0.9


def test_wrong_adaptations_are_refused_before_anything_runs(tmp_path: Path) -> None:
    sets = ("model.name=gpt", "data.dataset=shakespeare", "model.adapt=lora", "server.workers=2")
    done = run_here(
        "pretrain", "--out", tmp_path / "run", *(part for each in sets for part in ("--set", each))
    )

    assert done.returncode == 2
    for words in ("expected head, lora(r)", "name it as model.init", "a parameter server trains all params"):
        assert words in done.stderr


def _pretrain(folder: Path, out: str, rows: str, *sets: str, plan: str = "dp=1") -> str:
    x, y, x_test, y_test = _rows(rows)
    data: dict[str, Any] = {"x": x, "y": y, "x_test": x_test, "y_test": y_test}
    np.savez(folder / f"{rows}.npz", **data, classes=VOCAB, task="next_token")
    settings = (
        "data.dataset=npz",
        f"data.path={rows}.npz",
        "data.test_rows=0",
        "train.steps=60",
        "train.batch_size=16",
        "train.lr=5e-3",
        *sets,
    )
    done = run_cli(
        "pretrain",
        "--out",
        out,
        "--plan",
        plan,
        *(part for each in settings for part in ("--set", each)),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _simulate(folder: Path, adapt: str) -> dict[str, Any]:
    sets = (
        "data.dataset=npz",
        "data.path=special.npz",
        "data.partition=iid",
        *MODEL,
        "model.init=tuned",
        *((f"model.adapt={adapt}",) if adapt else ()),
        "federation.runtimes={torch=1}",
        "federation.clients=3",
        "federation.rounds=1",
        "simulation.workers=1",
    )
    out = folder / f"federated-{adapt}"
    done = run_cli("simulate", "--out", out, *(part for each in sets for part in ("--set", each)), cwd=folder)
    assert done.returncode == 0, done.stderr
    return _report(out)


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text("utf-8"))
    return report


def _rows(name: str) -> tuple[np.ndarray, ...]:
    """Sequences that count up by one or, for `special`, by three."""
    rng = np.random.default_rng(len(name))
    step = 3 if name == "special" else 1
    ids = (rng.integers(VOCAB, size=(200, 1)) + np.arange(LENGTH + 1) * step) % VOCAB
    x, y = ids[:, :-1].astype(np.int32), ids[:, 1:].astype(np.int32)
    return x[:160], y[:160], x[160:], y[160:]
