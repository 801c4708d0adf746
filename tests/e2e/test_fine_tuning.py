"""A model is pretrained, fine-tuned by adapters on other data, and handed over: to serving, and to federated training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from coordinator.datacenter.documents import read_document
from coordinator.demos.fedloop_commands import BIN, FedloopCommands
from coordinator.demos.local_fleet import Daemon, LocalFleet, free_address, local_fleet
from coordinator.serving.paths import ADDRESS_FILE
from edge_client.files import file_sha256
from models import zoo
from models.job import read_params
from models.pretrain import params
from tests.support.cli import run_cli, run_here
from tests.support.long import extended
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

LENGTH, VOCAB = 12, 20
SIZES: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2}
MODEL = ("model.name=gpt", *(f"model.{key}={value}" for key, value in SIZES.items()))


@pytest.mark.parametrize("adapt", ["lora(2)", *extended("")])
def test_federated_training_goes_on_from_a_fine_tuned_model(adapt: str, tmp_path: Path) -> None:
    _pretrain(tmp_path, "base", "general", *MODEL)
    shown = _pretrain(
        tmp_path, "tuned", "special", "model.init=base", "model.adapt=lora(4, 8)", plan="tp=2,zero=3"
    )

    report = _report(tmp_path / "tuned")
    assert report["first_loss"] > report["final"]["test_loss"]
    assert f"{report['adapters']['parameters']:,} of " in shown
    trained = read_params(tmp_path / "tuned" / "adapters.safetensors")
    assert report["adapters"]["adapt"] == "lora(4, 8)"
    assert report["adapters"]["parameters"] == sum(value.size for value in trained.values())
    assert report["lineage"]["parent"]["sha256"] == file_sha256(tmp_path / "base" / "model.safetensors")
    same = _report(tmp_path / "base")["final"]["parameters"]
    assert report["final"]["parameters"] == same  # the products are in the weights

    found = _simulate(tmp_path, adapt)
    # an adapting run rounds the frozen matrices to 8 bits
    tolerance = 0.01 if adapt else 1e-5
    assert found["start"]["test_loss"] == pytest.approx(report["final"]["test_loss"], abs=tolerance)
    assert found["final"]["test_loss"] < found["start"]["test_loss"]


@pytest.mark.extended
def test_a_registered_version_of_a_fine_tuned_model_answers_programs(tmp_path: Path) -> None:
    _pretrain(tmp_path, "base", "general", *MODEL)
    _pretrain(tmp_path, "tuned", "special", "model.init=base", "model.adapt=lora(4)")
    rows = _rows("special")[2][:3]
    with local_fleet(tmp_path / "fleet") as fleet:
        fedloop = FedloopCommands(fleet, tmp_path, lambda line: None)
        fedloop("model", "add", "tuned", "--name", "plays")
        with _serving(fleet, tmp_path / "serving") as url:
            fedloop("serving", "deploy", "plays", "plays:1", "--home", tmp_path / "serving")
            described = {"name": "x", "datatype": "INT32", "shape": rows.shape, "data": rows.ravel().tolist()}
            reply = httpx.post(
                f"{url}/v2/models/plays/infer", json={"inputs": [described]}, timeout=60
            ).json()

    (logits,) = (each for each in reply["outputs"] if each["name"] == "logits")
    answers = np.array(logits["data"], np.float32).reshape(logits["shape"])
    module = zoo.get("gpt", input_shape=(LENGTH,), classes=VOCAB, **SIZES).build(0).eval()
    params.fill(module, read_params(tmp_path / "tuned" / "model.safetensors"), "tuned")
    with torch.no_grad():
        expected = module(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(answers, expected, atol=1e-4)
    assert (answers.argmax(-1)[:, 1:] == (rows[:, 1:] + 3) % VOCAB).mean() > 0.9


@contextmanager
def _serving(fleet: LocalFleet, home: Path) -> Iterator[str]:
    """The address of a server."""
    environment = {"FEDLOOP_HOME": str(fleet.home), "FEDLOOP_COORDINATOR": fleet.operator_url}
    command = [str(BIN / "fedloop"), "serving", "start", "--home", str(home), "--listen", free_address()]
    server = Daemon(command, home.with_suffix(".log"), environment)
    server.start()
    try:
        wait_until((home / ADDRESS_FILE).exists, lambda: f"the server to start: {server.tail()}")
        yield read_document(home / ADDRESS_FILE)["url"]
    finally:
        server.stop()


def test_wrong_adaptations_are_refused_before_anything_runs(tmp_path: Path) -> None:
    sets = ("model.name=gpt", "data.dataset=shakespeare", "model.adapt=lora", "server.workers=2")
    done = run_here(
        "pretrain", "--out", tmp_path / "run", *(part for each in sets for part in ("--set", each))
    )

    assert done.returncode == 2
    for words in ("expected head, lora(r)", "give it as model.init", "a parameter server trains all params"):
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
