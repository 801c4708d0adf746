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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
_NOTHING = 1e-12
"""Seconds that rounding leaves of a pass."""


@dataclass(frozen=True)
class Run:
    """How long one step of a pipeline takes.

    Attributes:
        seconds: from the first pass to the end of the last.
        busy: seconds of passes, of every place along pp; longer where cores were shared.
    """

    seconds: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the places' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


def orders(plan: ParallelPlan) -> Sequence[Order]:
    """What every place along pp computes in a step, in its order. `plan` must have passed `plan.check`."""
    return _orders(plan.schedule if plan.pp > 1 else "1f1b", plan.pp, plan.pieces, plan.stages_per_rank)


@lru_cache(maxsize=256)
def _orders(schedule: str, pp: int, pieces: int, stages: int) -> Sequence[Order]:
    """Kept for plans that differ in other things: a planner asks for thousands."""
    plan = ParallelPlan(schedule=schedule, pp=pp, microbatches=pieces, stages=stages)  # type: ignore[arg-type]
    if schedule in SEVERAL_STAGES:
        return _torch_orders(plan)
    of = {"naive": _naive, "gpipe": _gpipe, "1f1b": _one_forward_one_backward}[schedule]
    return [of(plan, place) for place in range(pp)]


def simulate(
    plan: ParallelPlan,
    seconds: Callable[[Pass], float],
    transfer: Callable[[int], float] = lambda stage: 0.0,
    slower: Callable[[int, Sequence[bool]], float] = lambda place, active: 1.0,
) -> Run:
    """One step, from event to event, on a clock that only passes and transfers move.

    Args:
        seconds: of a pass, on a process with a core of its own. Torch leaves both halves of the first stage's backward
            pass to its W.
        transfer: of one micro-batch between stage `stage` and the one after it.
        slower: how much longer the process at a place takes, given which places are computing: idle ones leave their
            cores to others.
    """
    todo = [list(reversed(order)) for order in orders(plan)]
    places = {stage: place for place in range(plan.pp) for stage in stage_numbers(plan, place)}
    ended: dict[Pass, float] = {}
    running: list[tuple[Pass, float] | None] = [None] * plan.pp
    busy, now = [0.0] * plan.pp, 0.0
    while True:
        coming: list[float] = []
        for place in range(plan.pp):
            if running[place] is not None or not todo[place]:
                continue
            when = _ready(todo[place][-1], plan, ended, places, transfer)
            if when is not None and when <= now:
                this = todo[place].pop()
                running[place] = (this, seconds(this))
            elif when is not None:
                coming.append(when - now)
        active = [entry is not None for entry in running]
        slow = [slower(place, active) for place in range(plan.pp)]
        ends = [entry[1] * slow[place] for place, entry in enumerate(running) if entry is not None]
        if not ends and not coming:
            break
        step = min([*ends, *coming])
        now += step
        for place, entry in enumerate(running):
            if entry is None:
                continue
            busy[place] += step
            left = entry[1] - step / slow[place]
            running[place] = (entry[0], left)
            if left <= _NOTHING:
                running[place] = None
                ended[entry[0]] = now
    assert not any(todo), f"{plan}: the places wait for each other"
    return Run(now, tuple(busy))


def beside(
    order: Sequence[Pass],
    kept: Callable[[int], float] = lambda stage: 1.0,
    halved: Callable[[int], float] = lambda stage: 0.0,
) -> list[float]:
    """What other micro-batches hold of a place, by pass that it makes.

    Args:
        kept: what a micro-batch leaves in a stage until it comes back, 1 to count them. 1f1b keeps pp of them where gpipe
            keeps all.
        halved: what it leaves there besides between the two halves of its backward pass.
    """
    now: dict[tuple[int, int], float] = {}
    others = []
    for kind, stage, microbatch in order:
        now.pop((stage, microbatch), None)
        others.append(sum(now.values()))
        if kind in ("F", "I"):
            now[stage, microbatch] = kept(stage) + (halved(stage) if kind == "I" else 0.0)
    return others


def _ready(
    this: Pass,
    plan: ParallelPlan,
    ended: Mapping[Pass, float],
    places: Mapping[int, int],
    transfer: Callable[[int], float],
) -> float | None:
    """When what a pass needs is there, or None if it has not been made yet."""
    kind, stage, microbatch = this
    if kind == "F":
        if stage == 0:
            return 0.0
        needed = Pass("F", stage - 1, microbatch)
    elif kind == "W":
        needed = Pass("I", stage, microbatch)
    elif stage == plan.virtual_stages - 1:
        needed = Pass("F", stage, microbatch)
    else:
        needed = Pass(kind, stage + 1, microbatch)
        if needed not in ended and kind == "B":
            needed = Pass("I", stage + 1, microbatch)
    when = ended.get(needed)
    if when is None or places[stage] == places[needed.stage]:
        return when
    return when + transfer(min(stage, needed.stage))


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
