"""Whole simulations by different engines: the same experiment, the same result to rounding, and the same bits on any number of workers."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from tests.support.cli import run_here
from tests.support.long import extended
from tests.support.require import compiler

pytestmark = pytest.mark.slow

EXPERIMENT: dict[str, Any] = {
    "data": {"dataset": "digits", "partition": "dirichlet(0.3)"},
    "model": {"name": "mlp", "hidden": [16]},
    "federation": {"clients": 40, "clients_per_round": 40, "rounds": 1, "runtimes": {"torch": 1.0}},
    "local": {"epochs": 2, "batch_size": 16},
}


def simulate(folder: Path, engine: str, workers: int, **sections: Any) -> fedloop.Result:
    simulation = {"engine": engine, "workers": workers}
    return fedloop.simulate({**EXPERIMENT, "simulation": simulation, **sections}, out=folder)


@pytest.mark.parametrize("engine", ["stacked", "compiled"])
@pytest.mark.parametrize("strategy", extended("fedprox", "scaffold"))
def test_engines_agree_and_workers_do_not_matter(tmp_path: Path, strategy: str, engine: str) -> None:
    chosen: dict[str, Any] = {"strategy": {"name": strategy}}
    if engine == "compiled":
        chosen["model"] = {"name": "cnn", "channels": [2, 4]}
        compiler()
    pool = simulate(tmp_path / "pool", "pool", 2, **chosen)
    one, two = (simulate(tmp_path / f"{engine} {n}", engine, n, **chosen) for n in (1, 2))

    assert one.report["final"]["model_sha256"] == two.report["final"]["model_sha256"]
    assert pool.report["final"]["model_sha256"] != one.report["final"]["model_sha256"]
    for name, value in pool.params.items():
        np.testing.assert_allclose(one.params[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_stacked_is_refused_for_a_users_own_convolutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n"
        "def net(input_shape, classes):\n"
        "    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        fedloop.UserError, match=r"simulation\.engine = .stacked. cannot train .* Unflatten '0'"
    ):
        simulate(tmp_path / "run", "stacked", 1, model={"name": "mine:net"})
    assert not (tmp_path / "run" / "report.json").exists()


def test_the_engine_of_a_users_own_model_is_that_of_its_layers_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler()
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\n"
        "class Net(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.unsqueeze(1))\n\n\n"
        "def net(input_shape, classes):\n"
        "    return Net(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    own: dict[str, Any] = {"model": {"name": "mine:net"}}

    chosen = simulate(tmp_path / "chosen", "auto", 2, **own)
    named = simulate(tmp_path / "named", "compiled", 2, **own)

    assert chosen.report["final"]["model_sha256"] == named.report["final"]["model_sha256"]
    recorded = tomllib.loads((tmp_path / "chosen" / "experiment.toml").read_text())
    assert recorded["simulation"]["engine"] == "compiled"
    assert_longer_run_is_that_from_the_start(tmp_path, own)


def assert_longer_run_is_that_from_the_start(folder: Path, own: dict[str, Any]) -> None:
    done = run_here("simulate", "--resume", folder / "chosen", "--set", "federation.rounds=2")
    assert done.returncode == 0, done.stderr
    whole = simulate(folder / "whole", "auto", 1, **own, federation={**EXPERIMENT["federation"], "rounds": 2})
    report = json.loads((folder / "chosen" / "report.json").read_text())
    assert report["final"]["model_sha256"] == whole.report["final"]["model_sha256"]
