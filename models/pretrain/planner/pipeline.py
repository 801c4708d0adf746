"""Time of micro-batches through the stages of a pipeline whose processes may share cores.

`models.pretrain.parallel.model.pipeline_schedule` has the order of passes; this module adds how long a plan's stages take
and what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from models.pretrain.parallel.model import pipeline_schedule
from models.pretrain.parallel.model.pipeline_schedule import Pass, Run
from models.pretrain.parallelize import stage_numbers
from models.pretrain.plan import ParallelPlan


@dataclass(frozen=True)
class Stages:
    """How long each stage takes.

    Attributes:
        forward, backward: seconds of one micro-batch, by stage, on a process with its own core.
        send: seconds to send the output of stage s to stage s + 1, or its gradient back.
        slower: slowdown of the rank at a place, given which places are computing.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    send: Sequence[float]
    slower: Callable[[int, Sequence[bool]], float] = lambda place, active: 1.0


def place_of(plan: ParallelPlan, stage: int) -> int:
    """The rank along pp that has a stage."""
    return next(place for place in range(plan.pp) if stage in stage_numbers(plan, place))


def simulate(plan: ParallelPlan, stages: Stages) -> Run:
    """One step, as a discrete-event simulation."""
    return pipeline_schedule.simulate(
        plan, lambda this: _seconds(this, stages), lambda stage: stages.send[stage], stages.slower
    )


def estimate(plan: ParallelPlan, stages: Stages) -> Run:
    """Estimate without simulating every pass, for long pipelines: the slowest rank's work plus its idle time at both
    ends, (p - 1) / v of its micro-batches with v stages a rank, a third of that with halved passes.
    """
    work = [
        sum(stages.forward[stage] + stages.backward[stage] for stage in stage_numbers(plan, place))
        for place in range(plan.pp)
    ]
    busy = [
        plan.num_microbatches * seconds * stages.slower(place, [True] * plan.pp)
        for place, seconds in enumerate(work)
    ]
    third = 3 if plan.schedule in ("zero-bubble", "zbv") else 1
    empty = (plan.pp - 1) / plan.stages_per_rank / third / plan.num_microbatches
    if plan.schedule == "naive":
        empty = plan.pp - 1.0
    return Run(max(busy) * (1 + empty) + 2 * sum(stages.send), tuple(busy))


def passes(
    plan: ParallelPlan, kept: Sequence[float], halved: Sequence[float]
) -> list[list[tuple[Pass, float]]]:
    """For every rank along pp: its passes, and the bytes of other micro-batches meanwhile, where one leaves `kept` in
    every stage, and `halved` more between its I and W."""
    # micro-batches beyond the first few times pp repeat the same pattern
    all_held = plan.pp > 1 and plan.schedule == "gpipe"
    few = replace(
        plan, microbatches=plan.num_microbatches if all_held else min(plan.num_microbatches, 4 * plan.pp)
    )
    return [
        list(
            zip(
                order,
                pipeline_schedule.held_by_others(order, lambda s: kept[s], lambda s: halved[s]),
                strict=True,
            )
        )
        for order in pipeline_schedule.orders(few)
    ]


def _seconds(this: Pass, stages: Stages) -> float:
    if this.kind == "F":
        return stages.forward[this.stage]
    return stages.backward[this.stage] * (1.0 if this.kind == "B" else 0.5)
