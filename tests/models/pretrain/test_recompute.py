"""Recomputation trains the same and keeps as few bytes as its formula says."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from models.pretrain import forward_backward, world
from models.pretrain.parallelize import parallelize, sizes_of
from models.pretrain.plan import ActivationCheckpoint, ParallelPlan, Sizes, parse
from models.pretrain.planner.live_memory import LiveBytes
from models.zoo import gpt
from tests.models.pretrain.curves import Case
from tests.support import ranks

pytestmark = pytest.mark.slow

ROWS, LENGTH, WIDTH, HEADS, VOCAB = 4, 64, 96, 4, 50
SIZES = Sizes(heads=HEADS, width=WIDTH, hidden=4 * WIDTH, length=LENGTH)
ALONE = [
    "activation_checkpoint=none",
    "activation_checkpoint=selective",
    "activation_checkpoint=full",
    "activation_checkpoint=selective,precision=bf16",
    "activation_checkpoint=full,precision=bf16",
]
SPLIT = ["tp=2", "tp=2,activation_checkpoint=selective", "tp=2,sequence=true,activation_checkpoint=full"]


def kept(plans: list[str]) -> list[float]:
    """Bytes that one layer keeps between its passes, measured as what four further layers add. Runs in the ranks."""
    found = []
    with world.join(parse(plans[0])) as first:
        for text in plans:
            here = world.build(parse(text), first.device)
            few, many = (_bytes(here, layers) for layers in (2, 6))
            found.append((many - few) / 4)
    return found


def _bytes(here: world.World, layers: int) -> int:
    spec = gpt.spec((LENGTH,), VOCAB, width=WIDTH, layers=layers, heads=HEADS)
    parallel = parallelize(spec.build(0), spec.layout, here)
    x = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with LiveBytes(parallel.parts[0].parameters()) as live:
        before = live.now
        with forward_backward._precision(here):  # which caches copies of the weights until it is left
            logits = parallel.parts[0](x)
        gc.collect()
        found = live.now - before
    del logits
    return found


@pytest.mark.parametrize("plans", [ALONE, SPLIT], ids=["alone", "tp"])
def test_a_layer_keeps_what_the_formula_says(plans: list[str]) -> None:
    for measured in ranks.run(parse(plans[0]).processes, "tests.models.pretrain.test_recompute:kept", plans):
        for text, found in zip(plans, measured, strict=True):
            assert found == pytest.approx(layer_bytes(SIZES, parse(text), ROWS), rel=0.05), text


def test_autocast_without_recomputation_keeps_copies_of_the_weights_too() -> None:
    (measured,) = ranks.run(1, "tests.models.pretrain.test_recompute:kept", ["precision=bf16"])[0]
    weights = 12 * WIDTH**2 * 2
    expected = layer_bytes(SIZES, parse("precision=bf16"), ROWS) + weights
    assert measured == pytest.approx(expected, rel=0.05)


def test_savings_are_those_of_the_paper() -> None:
    """Korthikanti 2022, table 2, without attention's square and without dropout, two bytes a number, `none`: 32 s b h."""
    plan = ParallelPlan(zero=2, precision="bf16")
    tokens = ROWS * LENGTH
    statistics = 4 * (4 + HEADS) * tokens
    assert layer_bytes(SIZES, plan, ROWS) == 32 * tokens * WIDTH + statistics

    def of(which: ActivationCheckpoint) -> float:
        return layer_bytes(SIZES, ParallelPlan(activation_checkpoint=which), ROWS)

    assert of("full") == pytest.approx(of("none") / 16, rel=0.05)
    assert of("selective") == pytest.approx(of("none") * 10 / 16, rel=0.05)
    assert layer_bytes(SIZES, ParallelPlan(activation_checkpoint="full"), ROWS, recomputed=False) == of(
        "none"
    )


def test_recomputed_activations_train_the_same() -> None:
    plans = [
        "dp=1",
        "activation_checkpoint=full",
        "activation_checkpoint=selective",
        "microbatches=2,activation_checkpoint=full",
    ]
    alone, *others = ranks.run(1, "tests.models.pretrain.curves:curves", [Case(plan) for plan in plans])[0]
    for plan, found in zip(plans[1:], others, strict=True):
        np.testing.assert_allclose(found, alone, atol=1e-6, err_msg=plan)


def test_sizes_of_a_model_are_those_the_formula_takes() -> None:
    found = sizes_of(gpt.spec((LENGTH,), VOCAB, width=WIDTH, layers=2, heads=HEADS))
    assert (found.heads, found.width, found.hidden, found.length) == (HEADS, WIDTH, 4 * WIDTH, LENGTH)


def layer_bytes(sizes: Sizes, plan: ParallelPlan, rows: int, recomputed: bool = True) -> float:
    """Bytes one layer keeps of a micro-batch of `rows` rows on one process, from its forward to its backward pass.

    Layers with experts keep more. With `cp`, exchanges around attention keep ten more tensors of its width.

    Args:
        recomputed: whether `plan.activation_checkpoint` applies, or `none`: what a recomputing layer keeps during its own backward
            pass.
    """
    D, F, tp = sizes.width, sizes.hidden, plan.tp
    tokens = rows * sizes.length / plan.cp
    spread = tp if plan.sequence else 1
    number = 2 if plan.precision == "bf16" else 4  # bytes of a matrix product's inputs and outputs
    # FSDP also casts the activations between layers; autocast does not
    residual = number if plan.zero >= 2 else 4
    which = plan.activation_checkpoint if recomputed else "none"
    if which == "full":
        return tokens * D / spread * residual
    if which == "selective":
        return tokens * (D / spread * residual + (2 * D + (3 * D + F) / tp) * number)
    # autocast makes three copies of the input of query, key and value
    norms = 2 * D / spread * residual + (2 if residual == number else 4) * D * number
    statistics = 4 * (4 / spread + sizes.heads / tp / plan.cp)  # of two norms, and of every head's softmax
    exchanged = 10 * D / tp * number if plan.cp > 1 else 0
    return tokens * (norms + (4 * D + 2 * F) / tp * number + statistics + exchanged)
