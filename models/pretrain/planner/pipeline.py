"""How long micro-batches take through the stages of a pipeline whose processes may have to share cores.

`models.pretrain.model_parallel.timetable` says who does what in which order; here every process follows its list, waits for its
neighbours, and computes the slower the more processes compute at that moment: idle processes leave their cores to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from models.pretrain.model_parallel import timetable
from models.pretrain.model_parallel.timetable import Order, Pass
from models.pretrain.parallelize import stage_numbers
from models.pretrain.plan import ParallelPlan


@dataclass(frozen=True)
class Stages:
    """How long each stage takes.

    Attributes:
        forward, backward: seconds of one micro-batch, by stage, on a process that has a core of its own.
        send: seconds until what stage s gave has reached stage s + 1, or its gradient has come back.
        slower: how much longer the process at a place takes, given which places are computing.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    send: Sequence[float]
    slower: Callable[[int, Sequence[bool]], float] = lambda place, active: 1.0


@dataclass(frozen=True)
class Run:
    """What a pipeline did.

    Attributes:
        seconds: from the first forward to the last backward pass.
        busy: seconds each process computed, longer where cores were shared.
    """

    seconds: float
    busy: list[float]


def place_of(plan: ParallelPlan, stage: int) -> int:
    """Which process along pp has a stage."""
    return next(place for place in range(plan.pp) if stage in stage_numbers(plan, place))


def simulate(plan: ParallelPlan, stages: Stages) -> Run:
    """One step, from event to event."""
    pp = plan.pp
    todo = [list(reversed(order)) for order in orders(plan)]
    arrived: dict[Pass, float] = {}
    running: list[tuple[Pass, float] | None] = [None] * pp
    busy, now = [0.0] * pp, 0.0
    while True:
        coming: list[float] = []
        for place in range(pp):
            if running[place] is not None or not todo[place]:
                continue
            when = _ready(todo[place][-1], plan, arrived, stages)
            if when is not None and when <= now:
                this = todo[place].pop()
                running[place] = (this, _seconds(this, stages))
            elif when is not None:
                coming.append(when - now)
        active = [entry is not None for entry in running]
        slow = [stages.slower(place, active) for place in range(pp)]
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
            if left <= 1e-12:
                running[place] = None
                arrived[entry[0]] = now
    return Run(now, busy)


def bound(plan: ParallelPlan, stages: Stages) -> Run:
    """About the same without following every pass, for long pipelines: the slowest process's work, and what runs empty
    before and after it, (p - 1) / v of its micro-batches with v stages a process, a third of that with halved passes.
    """
    work = [
        sum(stages.forward[stage] + stages.backward[stage] for stage in stage_numbers(plan, place))
        for place in range(plan.pp)
    ]
    busy = [
        plan.pieces * seconds * stages.slower(place, [True] * plan.pp) for place, seconds in enumerate(work)
    ]
    third = 3 if plan.schedule in ("zero-bubble", "zbv") else 1
    empty = (plan.pp - 1) / plan.stages_per_rank / third / plan.pieces
    if plan.schedule == "naive":
        empty = plan.pp - 1.0
    return Run(max(busy) * (1 + empty) + 2 * sum(stages.send), busy)


def held(plan: ParallelPlan, kept: Sequence[float]) -> list[float]:
    """Bytes of activations that each process along pp holds at most, where a micro-batch leaves `kept` in every stage."""
    # micro-batches beyond the first few times pp only repeat what those before them did
    pieces = plan.pieces if plan.schedule in ("naive", "gpipe") else min(plan.pieces, 4 * plan.pp)
    return timetable.held(replace(plan, microbatches=pieces), lambda stage: kept[stage])


def orders(plan: ParallelPlan) -> Sequence[Order]:
    """As `timetable.orders`, kept for plans that differ in other things."""
    return _orders(plan.schedule, plan.pp, plan.pieces, plan.stages_per_rank)


@lru_cache(maxsize=256)
def _orders(schedule: str, pp: int, pieces: int, stages: int) -> Sequence[Order]:
    return timetable.orders(ParallelPlan(schedule=schedule, pp=pp, microbatches=pieces, stages=stages))  # type: ignore[arg-type]


def _ready(this: Pass, plan: ParallelPlan, arrived: dict[Pass, float], stages: Stages) -> float | None:
    """When what a pass needs is there, or None if it has not been made yet."""
    kind, stage, micro = this
    if kind == "W":
        return arrived.get(Pass("I", stage, micro))
    if kind == "F":
        if not stage:
            return 0.0
        before, sent = Pass("F", stage - 1, micro), stages.send[stage - 1]
    elif stage == plan.virtual_stages - 1:
        return arrived.get(Pass("F", stage, micro))
    else:
        before, sent = Pass(kind, stage + 1, micro), stages.send[stage]
        if before not in arrived and kind != "I":
            before = Pass("I", stage + 1, micro)
    when = arrived.get(before)
    if when is None:
        return None
    return when if place_of(plan, stage) == place_of(plan, before.stage) else when + sent


def _seconds(this: Pass, stages: Stages) -> float:
    if this.kind == "F":
        return stages.forward[this.stage]
    return stages.backward[this.stage] * (1.0 if this.kind == "B" else 0.5)
