"""A training that was saved goes on under any plan as if it had not stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.pretrain.plan import parse
from tests.support import ranks

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
HELPERS = "tests.models.pretrain.resumed"
MODEL = {"vocab": 51}  # which no degree but 3 divides

PLANS = [
    "dp=1",
    "dp=3",
    "dp=4,zero=3",
    "dp=8,zero=2",
    "tp=2,dp=2",
    "tp=4,loss_parallel=true",
    "cp=2,dp=2",
    "pp=2,schedule=interleaved",
    "pp=2,dp=2,tp=2",
    "dp=4,zero=3,shards=2",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of checkpoints for every plan."""
    root = tmp_path_factory.mktemp("saved")
    folders = {plan: root / plan for plan in PLANS}
    for plan, folder in folders.items():
        ranks.run(parse(plan).processes, f"{HELPERS}:saved", plan, folder, MODEL)
    return folders


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process that was never interrupted."""
    return ranks.run(1, f"{HELPERS}:saved", "dp=1", tmp_path_factory.mktemp("alone"), MODEL)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_a_training_goes_on_under_another_plan(plan: str, saved: dict[str, Path], alone: list[float]) -> None:
    for found in ranks.run(parse(plan).processes, f"{HELPERS}:resumed", plan, saved, MODEL):
        for before, (losses, _) in found.items():
            np.testing.assert_allclose(losses, alone[3:], atol=TOLERANCE, err_msg=f"{before} -> {plan}")
