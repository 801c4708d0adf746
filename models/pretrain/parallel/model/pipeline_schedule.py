"""Pipeline schedules: the order of passes on every rank, and the idle time and activations that follow from it.

Every rank along pp works through its own list of passes; a pass starts when its turn has come and its input has
arrived from the neighbouring stage. Idle share of a step (the bubble), with p ranks, m micro-batches, v stages a rank,
and stages of equal cost:

    naive                (p - 1) / p            one micro-batch in flight at a time
    gpipe, 1f1b          (p - 1) / (m + p - 1)  Huang 2019, section 2.3; Narayanan 2019
    interleaved          (p - 1) / (v m + p - 1), m divisible by p   Narayanan 2021, section 2.2.2
    zero-bubble, zbv     (p - 1) / (3 v m + p - 1), if forward and both halves of backward cost the same: gradients of
                         weights, which no other pass needs, fill the other gaps (Qi 2023); zbv from m = 2 p - 1 on

The last two need a layer's backward pass in two halves. For a linear layer these are two matrix products, and
autograd computes only the requested one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from models.pretrain.plan import ParallelPlan

Kind = Literal["F", "B", "I", "W"]
"""Forward, backward, and the two halves of backward: gradients of the input and of the weights."""

MULTI_STAGE: dict[str, Any] = {
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
"""Seconds left of a pass by rounding."""


@dataclass(frozen=True)
class Run:
    """How long one step of a pipeline takes.

    Attributes:
        seconds: from the first pass to the end of the last.
        busy: seconds of passes, of every rank along pp; longer where cores are shared.
        last: when the last pass that computes gradients of weights began and ended, by stage.
    """

    seconds: float
    busy: tuple[float, ...]
    last: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def orders(plan: ParallelPlan) -> Sequence[Order]:
    """The passes of a step on every rank along pp, in order. `plan` must have passed `plan_rules.check`."""
    return _orders(
        plan.schedule if plan.pp > 1 else "1f1b", plan.pp, plan.num_microbatches, plan.stages_per_rank
    )


@lru_cache(maxsize=256)
def _orders(schedule: str, pp: int, pieces: int, stages: int) -> Sequence[Order]:
    """Cached for plans that differ in other settings: a planner asks for thousands."""
    plan = ParallelPlan(schedule=schedule, pp=pp, microbatches=pieces, stages=stages)  # type: ignore[arg-type]
    if schedule in MULTI_STAGE:
        return _torch_orders(plan)
    return [_order(plan, place) for place in range(pp)]


def simulate(
    plan: ParallelPlan,
    seconds: Callable[[Pass], float],
    transfer: Callable[[int], float] = lambda stage: 0.0,
    slower: Callable[[int, Sequence[bool]], float] = lambda place, active: 1.0,
) -> Run:
    """One step, as a discrete-event simulation.

    Args:
        seconds: of a pass, on a process with its own core. Torch leaves both halves of the first stage's backward
            pass to its W.
        transfer: seconds for one micro-batch between stage `stage` and the next.
        slower: slowdown of the rank at a place, given which places are computing: idle ones leave their cores to
            others.
    """
    todo = [list(reversed(order)) for order in orders(plan)]
    places = {stage: place for place in range(plan.pp) for stage in plan.stage_numbers(place)}
    ended: dict[Pass, float] = {}
    last: dict[int, tuple[float, float]] = {}
    began = [0.0] * plan.pp
    running: list[tuple[Pass, float] | None] = [None] * plan.pp
    busy, now = [0.0] * plan.pp, 0.0
    while True:
        coming: list[float] = []
        for place in range(plan.pp):
            if running[place] is not None or not todo[place]:
                continue
            when = _ready(todo[place][-1], plan, ended, places, transfer)
            if when is not None and when <= now:
                this, began[place] = todo[place].pop(), now
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
                if entry[0].kind in ("B", "W"):
                    last[entry[0].stage] = began[place], now
    assert not any(todo), f"{plan}: the places wait for each other"
    return Run(now, tuple(busy), last)


def held_by_others(
    order: Sequence[Pass],
    kept: Callable[[int], float] = lambda stage: 1.0,
    halved: Callable[[int], float] = lambda stage: 0.0,
) -> list[float]:
    """What the other micro-batches hold on a rank, for every pass of `order`.

    Args:
        kept: what a micro-batch leaves in a stage until it comes back, 1 to count them. 1f1b keeps pp of them where
            gpipe keeps all.
        halved: what it additionally leaves there between the two halves of its backward pass.
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
    """When the input of a pass is available, or None if it has not been computed yet."""
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


def _order(plan: ParallelPlan, place: int) -> Order:
    """The order of a schedule with one stage a rank: some passes forward ahead, then backward and forward in turns."""
    count = plan.num_microbatches
    ahead = {"naive": 1, "gpipe": count, "1f1b": min(count, plan.pp - place)}[plan.schedule]
    order = [Pass("F", place, microbatch) for microbatch in range(ahead)]
    for microbatch in range(count):
        order.append(Pass("B", place, microbatch))
        if ahead + microbatch < count:
            order.append(Pass("F", place, ahead + microbatch))
    return order


def _torch_orders(plan: ParallelPlan) -> list[Order]:
    # all that torch reads of a stage to compute an order
    place = {"num_stages": plan.virtual_stages, "group_size": plan.pp, "group_rank": 0}
    inside = {"submod": None, "is_first": False, "is_last": False}
    stages = [SimpleNamespace(stage_index=number, **place, **inside) for number in plan.stage_numbers(0)]
    schedule = MULTI_STAGE[plan.schedule](stages, n_microbatches=plan.num_microbatches).pipeline_order
    return [
        [
            Pass(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in schedule[place]
            if action is not None
        ]
        for place in range(plan.pp)
    ]
