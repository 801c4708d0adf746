"""How long micro-batches take through the stages of a pipeline whose processes may have to share cores.

`models.pretrain.model_parallel.timetable` says who does what in which order; here it is told how long a
plan's stages take, and what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from models.pretrain.model_parallel import timetable
from models.pretrain.model_parallel.timetable import Pass, Run
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


def place_of(plan: ParallelPlan, stage: int) -> int:
    """Which process along pp has a stage."""
    return next(place for place in range(plan.pp) if stage in stage_numbers(plan, place))


def simulate(plan: ParallelPlan, stages: Stages) -> Run:
    """One step, from event to event."""
    return timetable.simulate(
        plan, lambda this: _seconds(this, stages), lambda stage: stages.send[stage], stages.slower
    )


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
    return Run(max(busy) * (1 + empty) + 2 * sum(stages.send), tuple(busy))


def passes(
    plan: ParallelPlan, kept: Sequence[float], halved: Sequence[float]
) -> list[list[tuple[Pass, float]]]:
    """By place along pp: its passes and the bytes that other micro-batches hold there meanwhile, where one leaves `kept` in
    every stage, and `halved` more between its I and W."""
    # micro-batches beyond the first few times pp only repeat what those before them did
    all_held = plan.pp > 1 and plan.schedule == "gpipe"
    few = replace(plan, microbatches=plan.pieces if all_held else min(plan.pieces, 4 * plan.pp))
    return [
        list(zip(order, timetable.beside(order, lambda s: kept[s], lambda s: halved[s]), strict=True))
        for order in timetable.orders(few)
    ]


def _seconds(this: Pass, stages: Stages) -> float:
    if this.kind == "F":
        return stages.forward[this.stage]
    return stages.backward[this.stage] * (1.0 if this.kind == "B" else 0.5)
