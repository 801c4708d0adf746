"""Who computes what in which order in a pipeline, and what follows from it: idle time and micro-batches held.

Every place along pp works through its own list of passes; a pass begins when its list has come to it and what it needs
has arrived from the neighbouring stage. Idle, relative to the time of a step (the bubble), with p places, m
micro-batches, v stages a place, and stages that cost the same:

    naive                (p - 1) / p            one micro-batch is on the way at a time
    gpipe, 1f1b          (p - 1) / (m + p - 1)  Huang 2019, section 2.3; Narayanan 2019
    interleaved          (p - 1) / (v m + p - 1), m divisible by p   Narayanan 2021, section 2.2.2
    zero-bubble, zbv     (p - 1) / (3 v m + p - 1), if forward and both halves of backward cost the same: gradients of
                         weights, which nobody waits for, fill the other gaps (Qi 2023); zbv from m = 2 p - 1 on

The last two need the two halves of a layer's backward pass apart. Those of a linear layer are two matrix products,
and autograd computes only the one that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from models.pretrain.parallelize import stage_numbers
from models.pretrain.plan import ParallelPlan

Kind = Literal["F", "B", "I", "W"]
"""Forward, backward, and backward in two halves: gradients of the input and of the weights."""

SEVERAL_STAGES: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    microbatch: int


Order = list[Pass]


@dataclass(frozen=True)
class Run:
    """How long one step of a pipeline takes.

    Attributes:
        seconds: from the first pass to the end of the last.
        busy: seconds of passes, of every place along pp.
    """

    seconds: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the places' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


def orders(plan: ParallelPlan) -> list[Order]:
    """What every place along pp computes in a step, in its order. `plan` must have passed `plan.check`."""
    if plan.pp > 1 and plan.schedule in SEVERAL_STAGES:
        return _torch_orders(plan)
    of = {"naive": _naive, "gpipe": _gpipe, "1f1b": _one_forward_one_backward}[plan.schedule]
    return [of(plan, place) for place in range(plan.pp)]


def simulate(
    plan: ParallelPlan, seconds: Callable[[Pass], float], transfer: Callable[[int], float] = lambda stage: 0.0
) -> Run:
    """One step on a clock that only passes move.

    Args:
        seconds: of a pass. Torch leaves both halves of the first stage's backward pass to its W.
        transfer: of one micro-batch between stage `stage` and the one after it.
    """
    waiting = [list(reversed(order)) for order in orders(plan)]
    ended: dict[Pass, float] = {}
    clock, busy = [0.0] * plan.pp, [0.0] * plan.pp
    while any(waiting):
        before = len(ended)
        for place, order in enumerate(waiting):
            while order and (needed := _needed(order[-1], plan)) in ended | {None: 0.0}:
                now = order.pop()
                arrived = 0.0
                if needed is not None:
                    arrived = ended[needed] + (
                        transfer(min(needed.stage, now.stage)) if needed.stage != now.stage else 0.0
                    )
                clock[place] = ended[now] = max(clock[place], arrived) + seconds(now)
                busy[place] += seconds(now)
        assert len(ended) > before, f"{plan}: the places wait for each other"
    return Run(max(clock), tuple(busy))


def held(plan: ParallelPlan, size: Callable[[int], float] = lambda stage: 1.0) -> list[float]:
    """What every place keeps at the most of micro-batches that went forward and not yet back.

    Args:
        size: of what one micro-batch leaves in a stage, 1 to count them. 1f1b keeps pp of them where gpipe keeps all.
    """
    return [_most_held(order, size) for order in orders(plan)]


def _needed(this: Pass, plan: ParallelPlan) -> Pass | None:
    """The pass of another stage, or of this one's forward, that `this` waits for."""
    kind, stage, microbatch = this
    if kind == "F":
        return Pass("F", stage - 1, microbatch) if stage else None
    if kind == "W":
        return Pass("I", stage, microbatch)
    if stage == plan.virtual_stages - 1:
        return Pass("F", stage, microbatch)
    return Pass(kind, stage + 1, microbatch)


def _most_held(order: Sequence[Pass], size: Callable[[int], float]) -> float:
    now = most = 0.0
    for each in order:
        now += {"F": 1, "B": -1, "I": 0, "W": -1}[each.kind] * size(each.stage)
        most = max(most, now)
    return most


def _naive(plan: ParallelPlan, place: int) -> Order:
    kinds: tuple[Kind, ...] = ("F", "B")
    return [Pass(kind, place, microbatch) for microbatch in range(plan.pieces) for kind in kinds]


def _gpipe(plan: ParallelPlan, place: int) -> Order:
    kinds: tuple[Kind, ...] = ("F", "B")
    return [Pass(kind, place, microbatch) for kind in kinds for microbatch in range(plan.pieces)]


def _one_forward_one_backward(plan: ParallelPlan, place: int) -> Order:
    ahead = min(plan.pieces, plan.pp - place)
    order = [Pass("F", place, microbatch) for microbatch in range(ahead)]
    for microbatch in range(plan.pieces):
        order.append(Pass("B", place, microbatch))
        if ahead + microbatch < plan.pieces:
            order.append(Pass("F", place, ahead + microbatch))
    return order


@dataclass
class _Stage:
    """What torch's schedules ask a stage when they lay out their order, which takes no processes."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    is_first: bool = False
    is_last: bool = False


def _torch_orders(plan: ParallelPlan) -> list[Order]:
    stages = [_Stage(number, plan.virtual_stages, plan.pp) for number in stage_numbers(plan, 0)]
    laid_out = SEVERAL_STAGES[plan.schedule](stages, n_microbatches=plan.pieces).pipeline_order
    return [
        [
            Pass(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in laid_out[place]
            if action is not None
        ]
        for place in range(plan.pp)
    ]
