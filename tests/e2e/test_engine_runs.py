"""Whole simulations by different engines: the same experiment, the same result to rounding, and the same bits on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
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
