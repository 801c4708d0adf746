"""Every way to spread a training trains what one process trains."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import ranks

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
CURVE = "tests.models.pretrain.curves:curve"

PLANS = [
    "dp=2",
    "dp=2,microbatches=2",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=4,zero=3,shards=2",
    "tp=2",
    "tp=2,dp=2",
    "tp=2,dp=2,zero=3",
    "cp=2",
    "dp=2,cp=2",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=1f1b",
    "pp=2,schedule=interleaved",
    "pp=2,schedule=zero-bubble",
    "pp=2,schedule=zbv",
    "dp=2,pp=2",
    "tp=2,pp=2",
    "dp=2,tp=2,pp=2",
    "dp=2,tp=2,pp=2,zero=3",
    "dp=2,recompute=full",
    "dp=2,recompute=selective",
]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return ranks.run(1, CURVE, "dp=1")[0]


@pytest.mark.parametrize("plan", PLANS)
def test_plan_trains_what_one_process_trains(plan: str, alone: list[float]) -> None:
    from models.pretrain.plan import parse

    for found in ranks.run(parse(plan).processes, CURVE, plan):
        np.testing.assert_allclose(found, alone, atol=TOLERANCE)
