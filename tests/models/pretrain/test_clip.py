"""Clipping sees the gradient of the whole model, however it is split."""

from __future__ import annotations

import numpy as np
import pytest

from models.pretrain import optimizers, trainer, world
from models.pretrain import plan as plans
from models.zoo import ModelSpec
from tests.models.pretrain.curves import settings, spec_of, tokens
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow

NORMS = "tests.models.pretrain.test_clip:norms"
LARGEST = 0.25
EXPERTS = {"name": "moe", "experts": 4, "chosen": 2}
PLANS = [
    "dp=4,zero=3,shards=2",
    "tp=2,pp=2,sequence=true",
    "dp=2,tp=2,zero=3,sequence=true",
    "dp=2,cp=2,zero=2",
    "pp=2,dp=2,schedule=zbv",
]
PLANS_WITH_EXPERTS = ["dp=4,ep=2", "dp=4,ep=4", "dp=2,ep=2,cp=2", "dp=2,ep=2,pp=2"]


@pytest.mark.parametrize(
    ("plans", "model"), [(PLANS, {"vocab": 49}), *extended((PLANS_WITH_EXPERTS, EXPERTS), (PLANS, {}))]
)
def test_norm_is_that_of_one_process(plans: list[str], model: dict[str, object]) -> None:
    ((expected, clipped),) = ranks.run(1, NORMS, ["dp=1"], model)[0]

    assert expected > LARGEST
    assert clipped == pytest.approx(LARGEST, rel=1e-4)
    for found in ranks.run(4, NORMS, plans, model):
        for plan, norms in zip(plans, found, strict=True):
            np.testing.assert_allclose(norms, (expected, clipped), rtol=1e-5, err_msg=plan)


def test_small_gradients_stay() -> None:
    ((before, after),) = ranks.run(1, NORMS, ["dp=1"], {}, 100.0)[0]

    assert before == after < 100


def norms(texts: list[str], model: dict[str, object], largest: float = LARGEST) -> list[tuple[float, float]]:
    """Runs in the ranks. By plan, the norm that clipping found, and what it finds a second time."""
    with world.join(plans.parse(texts[0])) as first:
        return [
            _norms(world.build(plans.parse(text), first.device), spec_of(**model), largest)  # type: ignore[arg-type]
            for text in texts
        ]


def _norms(here: world.World, spec: ModelSpec, largest: float) -> tuple[float, float]:
    training = trainer.build(spec, tokens(), settings(), here, seed=5)
    training.run(training.batches[0])
    parts = training.parallel.parts
    training.sums.finish()
    return float(optimizers.clip(parts, largest, here)), float(optimizers.clip(parts, largest, here))
