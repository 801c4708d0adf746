"""One federation, three runtimes: a round of LiteRT, PyTorch and TensorFlow clients is the round of PyTorch alone.

Both are real runs of the command. Six clients take five steps each from the same start; what differs is the
order in which kernels add float32 numbers, some 1e-7 a step, so 1e-4 leaves room for many of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_client.wire import arrays
from strategies.params import Params
from tests.support.cli import simulate
from tests.support.long import extended

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
SETTINGS = (
    "model.name=mlp",
    "federation.clients=6",
    "federation.clients_per_round=6",
    "local.steps=5",
    "simulation.workers=1",
)
# Control variates are zero in the first round, which therefore is FedAvg's; the second is the first to be corrected by them.
STRATEGIES = {
    "fedprox": ("strategy.name=fedprox", "strategy.mu=1.0", "federation.rounds=1"),
    "scaffold": ("strategy.name=scaffold", "federation.rounds=2"),
}


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["scaffold", *extended("fedprox")])
def test_a_round_of_three_runtimes_equals_the_round_of_pytorch_alone(tmp_path: Path, strategy: str) -> None:
    settings = [*SETTINGS, *STRATEGIES[strategy]]
    mixed = simulate(tmp_path / "mixed", [*settings, "federation.runtimes={litert=1, torch=1, tensorflow=1}"])
    alone = simulate(tmp_path / "alone", [*settings, "federation.runtimes={torch=1}"])
    assert mixed["runtimes"] == {"litert": 2, "tensorflow": 2, "torch": 2}
    assert alone["runtimes"] == {"torch": 6}
    assert [row["accepted"] for row in mixed["rounds"]] == [6] * len(mixed["rounds"])

    found, expected = _params(tmp_path / "mixed"), _params(tmp_path / "alone")
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=TOLERANCE, err_msg=name)
    # Other runtimes were at work: agreement to the last bit would mean that PyTorch trained them all.
    assert any((found[name] != expected[name]).any() for name in expected)
    assert mixed["final"]["test_accuracy"] == pytest.approx(alone["final"]["test_accuracy"], abs=2 / 359)


def _params(out: Path) -> Params:
    return arrays.decode((out / "model.safetensors").read_bytes())
