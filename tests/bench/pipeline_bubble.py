"""Idle share of real pipelines whose stages sleep, beside what the law of each schedule says.

A sleep needs no core and lets go of the GIL, so four processes wait for each other as on four processors. A stage
sleeps for its forward pass, for the gradients of its inputs and for those of its weights, as long for each; what else a step
takes, messages and autograd, counts as idle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from models.pretrain import forward_backward, world
from models.pretrain.data.batches import Batch
from models.pretrain.parallel.model import pipeline_schedule
from models.pretrain.parallelize import Parallel, Stage
from models.pretrain.plan import ParallelPlan, parse
from tests.models.pretrain.logged_pipeline import bubble
from tests.support import ranks

STAGES, MICROBATCHES = 4, (4, 8)
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
SECONDS = 0.25
"""Of the forward pass of one process's layers for one micro-batch: long beside the milliseconds that every action costs besides."""
REPEATS = 2
WIDTH = 8
NEAR = 0.03
"""How far from the law GPipe and 1F1B may be."""


def run() -> dict[str, Any]:
    """Idle share of every schedule, measured and by the law. Raises if they are further apart than they may be."""
    plans = [
        parse(f"pp={STAGES},schedule={schedule},microbatches={pieces}")
        for pieces in MICROBATCHES
        for schedule in SCHEDULES
        if schedule != "naive" or pieces == MICROBATCHES[0]  # its share is the same for any number
    ]
    texts = [str(plan) for plan in plans]
    measured = ranks.run(STAGES, f"{__name__}:bubbles", texts)[0]
    laws = [_law(plan) for plan in plans]
    print(f"pipeline bubble, p={STAGES}, stages sleep {SECONDS * 1000:.0f} ms forward and twice that back")
    print(f"{'m':>4} {'schedule':<12} {'measured':>9} {'law':>7}")
    for plan, found, law in zip(plans, measured, laws, strict=True):
        print(f"{plan.num_microbatches:>4} {plan.schedule:<12} {found:>9.3f} {law:>7.3f}")
    for pieces in MICROBATCHES:
        pairs = zip(plans, measured, strict=True)
        _check({plan.schedule: found for plan, found in pairs if plan.num_microbatches == pieces}, pieces)
    return {
        text: {"measured": found, "law": law} for text, found, law in zip(texts, measured, laws, strict=True)
    }


def _check(idle: dict[str, float], pieces: int) -> None:
    law = (STAGES - 1) / (pieces + STAGES - 1)
    for schedule in ("gpipe", "1f1b"):
        assert abs(idle[schedule] - law) <= NEAR, (
            f"{schedule}, m={pieces}: {idle[schedule]:.3f}, law {law:.3f}"
        )
    assert idle["interleaved"] < min(idle["gpipe"], idle["1f1b"]), f"m={pieces}: {idle}"
    assert idle["zero-bubble"] < idle["interleaved"], f"m={pieces}: {idle}"


def _law(plan: ParallelPlan) -> float:
    def seconds(one: pipeline_schedule.Pass) -> float:
        # torch leaves all gradients of the first stage to W
        halves = {"F": 1, "B": 2, "I": 1, "W": 1} if one.stage else {"F": 1, "B": 2, "I": 0, "W": 2}
        return halves[one.kind] * SECONDS / plan.stages_per_rank

    return bubble(pipeline_schedule.simulate(plan, seconds))


def bubbles(plans: Sequence[str]) -> list[float]:
    """Idle share of each plan in its least disturbed turn, of turns that they take one after the other. In the ranks."""
    with world.join(parse(plans[0])) as first:
        ways = [_step(world.build(parse(plan), first.device)) for plan in plans]
        found: list[list[float]] = [[] for _ in plans]
        for turn in range(REPEATS + 1):
            for way, idle, plan in zip(ways, found, plans, strict=True):
                seconds = way()
                if turn:  # in the first, stages ask each other for shapes
                    idle.append(1 - parse(plan).num_microbatches * 3 * SECONDS / seconds)
    return [min(idle) for idle in found]


def _step(here: world.World) -> Any:
    plan = here.plan
    numbers = plan.stage_numbers(here.coordinate("pp"))
    full = nn.ModuleDict({str(n): Sleeping(SECONDS / plan.stages_per_rank) for n in numbers})
    parallel = Parallel([Stage(full, [str(n)]) for n in numbers], numbers)
    run = forward_backward.build(parallel, lambda given, wanted: (given - wanted).square().sum(), here)
    x = torch.randn(plan.num_microbatches, WIDTH)

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        run(Batch(x, x, 1))
        seconds = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    return step


class Sleeping(nn.Module):
    """[B, D] -> [B, D], taking `seconds` forward and for each half of the backward pass.

    The bias has even the first stage compute gradients of what goes into the product.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(WIDTH) / 2), nn.Parameter(torch.zeros(WIDTH))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.bias
        of_inputs: torch.Tensor = _ByInputs.apply(x, self.weight.detach(), self.seconds)
        of_weights: torch.Tensor = _ByWeights.apply(x.detach(), self.weight, self.seconds)
        return of_inputs + of_weights


class _ByInputs(torch.autograd.Function):
    """x @ w, for the gradient of x. A node of its own, as the schedules that halve the backward pass need it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        time.sleep(seconds)
        return x @ weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient @ ctx.saved_tensors[0].t(), None, None


class _ByWeights(torch.autograd.Function):
    """Zeros, for the gradient of the weight of x @ w."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.seconds = seconds
        return x.new_zeros(*x.shape[:-1], weight.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return None, ctx.saved_tensors[0].t() @ gradient, None
