"""Recomputation trains the same and keeps as few bytes as its formula says."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from models.pretrain import passes, world
from models.pretrain.model_parallel import recompute
from models.pretrain.parallelize import parallelize, sizes_of
from models.pretrain.plan import ParallelPlan, Recompute, Sizes, parse
from models.pretrain.planner.live import LiveBytes
from models.zoo import gpt
from tests.models.pretrain.curves import Case
from tests.support import ranks

pytestmark = pytest.mark.slow

ROWS, LENGTH, WIDTH, HEADS, VOCAB = 4, 64, 96, 4, 50
SIZES = Sizes(heads=HEADS, width=WIDTH, hidden=4 * WIDTH, length=LENGTH)
ALONE = [
    "recompute=none",
    "recompute=selective",
    "recompute=full",
    "recompute=selective,precision=bf16",
    "recompute=full,precision=bf16",
]
SPLIT = ["tp=2", "tp=2,recompute=selective", "tp=2,sequence=true,recompute=full"]


def kept(plans: list[str]) -> list[float]:
    """Bytes that one layer keeps between its passes, measured as what four further layers add. Runs in the ranks."""
    found = []
    with world.join(parse(plans[0])) as first:
        for text in plans:
            here = world.arrange(parse(text), first.device)
            few, many = (_bytes(here, layers) for layers in (2, 6))
            found.append((many - few) / 4)
    return found


def _bytes(here: world.World, layers: int) -> int:
    spec = gpt.spec((LENGTH,), VOCAB, width=WIDTH, layers=layers, heads=HEADS)
    parallel = parallelize(spec.build(0), spec.layout, here)
    x = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with LiveBytes(parallel.parts[0].parameters()) as live:
        before = live.now
        with passes._precision(here):  # which caches copies of the weights until it is left
            logits = parallel.parts[0](x)
        gc.collect()
        found = live.now - before
    del logits
    return found


@pytest.mark.parametrize("plans", [ALONE, SPLIT], ids=["alone", "tp"])
def test_a_layer_keeps_what_the_formula_says(plans: list[str]) -> None:
    for measured in ranks.run(parse(plans[0]).processes, "tests.models.pretrain.test_recompute:kept", plans):
        for text, found in zip(plans, measured, strict=True):
            assert found == pytest.approx(recompute.layer_bytes(SIZES, parse(text), ROWS), rel=0.05), text


def test_autocast_without_recomputation_keeps_copies_of_the_weights_too() -> None:
    (measured,) = ranks.run(1, "tests.models.pretrain.test_recompute:kept", ["precision=bf16"])[0]
    weights = 12 * WIDTH**2 * 2
    expected = recompute.layer_bytes(SIZES, parse("precision=bf16"), ROWS) + weights
    assert measured == pytest.approx(expected, rel=0.05)


def test_savings_are_those_of_the_paper() -> None:
    """Korthikanti 2022, table 2, without attention's square and without dropout, two bytes a number, `none`: 32 s b h."""
    plan = ParallelPlan(zero=2, precision="bf16")
    tokens = ROWS * LENGTH
    statistics = 4 * (4 + HEADS) * tokens
    assert recompute.layer_bytes(SIZES, plan, ROWS) == 32 * tokens * WIDTH + statistics

    def of(which: Recompute) -> float:
        return recompute.layer_bytes(SIZES, ParallelPlan(recompute=which), ROWS)

    assert of("full") == pytest.approx(of("none") / 16, rel=0.05)
    assert of("selective") == pytest.approx(of("none") * 10 / 16, rel=0.05)
    assert recompute.layer_bytes(SIZES, ParallelPlan(recompute="full"), ROWS, recomputed=False) == of("none")


def test_what_is_recomputed_trains_the_same() -> None:
    plans = ["dp=1", "recompute=full", "recompute=selective", "microbatches=2,recompute=full"]
    alone, *others = ranks.run(1, "tests.models.pretrain.curves:curves", [Case(plan) for plan in plans])[0]
    for plan, found in zip(plans[1:], others, strict=True):
        np.testing.assert_allclose(found, alone, atol=1e-6, err_msg=plan)


def test_sizes_of_a_model_are_those_the_formula_takes() -> None:
    found = sizes_of(gpt.spec((LENGTH,), VOCAB, width=WIDTH, layers=2, heads=HEADS))
    assert (found.heads, found.width, found.hidden, found.length) == (HEADS, WIDTH, 4 * WIDTH, LENGTH)
