"""Seconds a step takes under a plan, by what they go to. Pure arithmetic over a profile.

    micro-batches through pieces, tp, cp and ep exchanges in every layer -> bubble -> gradients over dp -> optimizer

What is exposed depends on how the trainer does it: DistributedDataParallel exchanges all buckets but the last while the
backward pass goes on, where anything is idle to do so; `sum_gradients` exchanges after it; FSDP2 gathers every layer's
params before it is used. Communication that shares the processor with computation hides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from models.pretrain.collectives import cost
from models.pretrain.plan import ParallelPlan
from models.pretrain.planner import pipeline
from models.pretrain.planner.profile import Piece, Profile
from models.pretrain.planner.spread import Spread

VALUE_BYTES = 4
BUCKET_BYTES = 25 * 1024 * 1024
SIMULATED = 4096
"""Actions of a pipeline up to which it is simulated; longer ones are bounded."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step of the slowest process.

    Attributes:
        parts: what they go to: compute, tp, cp, ep, bubble, dp, optimizer, other.
    """

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)


class Parts(dict[str, float]):
    """Seconds by what they go to; what is not there is 0."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def merge(self, other: Mapping[str, float]) -> None:
        for name, seconds in other.items():
            self[name] += seconds


def predict(plan: ParallelPlan, profile: Profile, batch_size: int) -> Prediction:
    """For one step of `batch_size` rows."""
    spread = Spread(plan, profile, batch_size)
    slow = profile.machine.slower(spread.per_host)
    parts = Parts()
    if plan.pp > 1:
        parts.merge(_pipelined(spread))
    else:
        for name, seconds in _micro_batch(spread, spread.stages()[0], True).items():
            parts[name] += plan.pieces * seconds * (slow if name in ("compute", "other") else 1)
    worst = max(range(plan.pp), key=lambda place: _values(spread, place))
    parts["dp"] += _data(spread, worst, parts["compute"])
    parts["optimizer"] += _optimizer(spread, worst) * slow
    parts["other"] += (profile.step + _per_step(spread)) * slow
    return Prediction(sum(parts.values()), {name: seconds for name, seconds in parts.items() if seconds})


def uses(plan: ParallelPlan, profile: Profile) -> Counter[str]:
    """How often a step uses what has an overhead of its own, on the process that uses it most:

    tp, cp, ep: a layer and micro-batch; stage, stages, halves: a stage and micro-batch of schedules with one stage a
    process, several, several and halved backward passes; loss: a micro-batch whose loss tp ranks share; ddp, sums: a step
    whose gradients are summed during or after the backward pass; zero2, zero3: a unit of params gathered.
    """
    layers = -(-len(profile.layers) // plan.pp)
    used: Counter[str] = Counter()
    for name in ("tp", "cp", "ep"):
        if getattr(plan, name) > 1:
            used[name] = layers * plan.pieces
    if plan.loss_parallel:
        used["loss"] = plan.pieces
    if plan.pp > 1:
        used[_stage_kind(plan)] = plan.pieces * plan.stages_per_rank
    if plan.dp * plan.cp > 1:
        if plan.zero >= 2:
            used[f"zero{plan.zero}"] = (layers + plan.stages_per_rank) * _gathers(plan)
        elif plan.tp == plan.pp == plan.ep == 1:
            used["ddp"] = 1
        else:
            used["sums"] = 1
    return used


def _stage_kind(plan: ParallelPlan) -> str:
    if plan.stages_per_rank == 1:
        return "stage"
    return "halves" if plan.schedule in ("zero-bubble", "zbv") else "stages"


def _gathers(plan: ParallelPlan) -> int:
    """How often a step gathers every unit of params."""
    return plan.pieces * (2 if plan.zero == 3 else 1)


def _per_step(spread: Spread) -> float:
    """Overheads that no micro-batch and no layer has."""
    used, overhead = uses(spread.plan, spread.profile), spread.profile.overhead
    return sum(used[name] * overhead.get(name, 0.0) for name in ("ddp", "sums", "zero2", "zero3"))


def _micro_batch(spread: Spread, pieces: list[Piece], last: bool) -> Parts:
    """Forward and backward of one micro-batch through a stage on a process that has a core to itself."""
    both = Parts()
    for backward in (False, True):
        both.merge(_pass(spread, pieces, last, backward))
    return both


def _pass(spread: Spread, pieces: list[Piece], last: bool, backward: bool) -> Parts:
    plan, rows, overhead = spread.plan, spread.rows, spread.profile.overhead
    parts = Parts()
    for piece in pieces:
        seconds = piece.backward[spread.policy(piece)] if backward else piece.forward
        parts["compute"] += seconds.at(rows, plan.tp)
        _exchange(parts, spread, piece, backward)
        if spread.is_layer(piece):
            for name in ("tp", "cp", "ep"):
                if getattr(plan, name) > 1:
                    parts["other"] += overhead.get(name, 0.0) / 2
    if last:
        loss = spread.profile.loss
        seconds = loss.backward["none"] if backward else loss.forward
        parts["compute"] += seconds.at(rows, spread.loss_tp())
        if plan.loss_parallel:
            parts["other"] += overhead.get("loss", 0.0) / 2
        if plan.tp > 1 and not plan.loss_parallel and not backward:
            logits = spread.profile.last.output_bytes * rows
            parts["tp"] += cost.all_gather_seconds(spread.link("tp"), plan.tp, logits)
    return parts


def _exchange(parts: Parts, spread: Spread, piece: Piece, backward: bool) -> None:
    """What tp, cp and ep ranks exchange in one pass of a piece. Inner activations are as large as its output."""
    plan, size = spread.plan, piece.output_bytes * spread.rows
    again = (
        2 if backward and spread.policy(piece) == "full" else 1
    )  # a recomputed forward pass exchanges again
    if plan.tp > 1:
        forward = piece.rows * cost.all_reduce_seconds(spread.link("tp"), plan.tp, size)
        back = piece.columns * cost.all_reduce_seconds(spread.link("tp"), plan.tp, size)
        parts["tp"] += back + (again - 1) * forward if backward else forward
    if plan.cp > 1:
        # query, key, value, and what attention gives; heads of a tp rank only
        one = cost.all_to_all_seconds(spread.link("cp"), plan.cp, size / plan.tp)
        parts["cp"] += 4 * again * piece.attentions * one
    if plan.ep > 1:
        parts["ep"] += 2 * again * piece.experts * cost.all_to_all_seconds(spread.link("ep"), plan.ep, size)


def _pipelined(spread: Spread) -> Parts:
    plan = spread.plan
    stages = spread.stages()
    used = uses(plan, spread.profile)[_stage_kind(plan)]
    extra = spread.profile.overhead.get(_stage_kind(plan), 0.0) if used else 0.0
    passes = [
        [_pass(spread, pieces, number == len(stages) - 1, backward) for backward in (False, True)]
        for number, pieces in enumerate(stages)
    ]
    described = pipeline.Stages(
        forward=[sum(forward.values()) + extra / 2 for forward, _ in passes],
        backward=[sum(backward.values()) + extra / 2 for _, backward in passes],
        send=[
            cost.send_seconds(spread.send_link(number), pieces[-1].output_bytes * spread.rows)
            for number, pieces in enumerate(stages[:-1])
        ],
        slower=spread.slower,
    )
    works = []
    for place in range(plan.pp):
        work = Parts()
        for stage in spread.stages_of(place):
            for found in passes[stage]:
                work.merge(found)
            work["other"] += extra
        works.append(Parts({name: plan.pieces * value for name, value in work.items()}))
    place = max(range(plan.pp), key=lambda place: sum(works[place].values()))
    busiest = works[place]
    alone = sum(busiest.values())
    run = (pipeline.simulate if plan.virtual_stages * plan.pieces <= SIMULATED else pipeline.bound)(
        plan, described
    )
    seconds, busy = run.seconds, run.busy[place]
    busiest["compute"] += busy - alone  # cores are shared
    busiest["bubble"] = max(0.0, seconds - busy)
    return busiest


def _values(spread: Spread, place: int) -> float:
    """Parameters of the process at `place` along pp, before zero shares them out."""
    stages = spread.stages()
    return sum(spread.values(stages[stage]) for stage in spread.stages_of(place))


def _data(spread: Spread, place: int, compute: float) -> float:
    """Exposed exchange of gradients, and of params that are shared out."""
    plan, machine = spread.plan, spread.profile.machine
    if spread.data == 1:
        return 0.0
    values = _values(spread, place)
    size = values * VALUE_BYTES
    hides = machine.device != "cpu" or spread.per_host < machine.cores
    if plan.zero >= 2:
        stages = spread.stages()
        units = [
            spread.values([piece]) * VALUE_BYTES
            for stage in spread.stages_of(place)
            for piece in stages[stage]
            if spread.is_layer(piece)
        ]
        units.append(max(0.0, size - sum(units)))
        kept, n = spread.link("kept"), spread.keepers
        gathers = sum(cost.all_gather_seconds(kept, n, unit) for unit in units) * _gathers(plan)
        scatters = sum(cost.reduce_scatter_seconds(kept, n, unit) for unit in units)
        if plan.replicate > 1:
            scatters += cost.all_reduce_seconds(spread.link("replicate"), plan.replicate, size / n)
        exposed = max(0.0, gathers + scatters - compute) if hides else gathers + scatters
        # the first gather and the last scatter have nothing to hide behind
        edge = cost.all_gather_seconds(kept, n, units[-1]) + cost.reduce_scatter_seconds(kept, n, units[0])
        return max(exposed, edge)
    # experts are kept by several of the ranks and exchanged among the others only; close to all of it is the rest
    all_reduce = cost.all_reduce_seconds(spread.link("data"), spread.data, size)
    gathered = cost.all_gather_seconds(spread.link("data"), spread.data, size) if plan.zero == 1 else 0.0
    if plan.tp == plan.pp == plan.ep == 1 and hides:
        last = cost.all_reduce_seconds(spread.link("data"), spread.data, min(size, BUCKET_BYTES))
        return max(last, all_reduce - compute / plan.pieces * 2 / 3) + gathered
    return all_reduce + gathered


def _optimizer(spread: Spread, place: int) -> float:
    optimizer, stages = spread.profile.optimizer, spread.stages()
    tensors = sum(piece.tensors for stage in spread.stages_of(place) for piece in stages[stage])
    values = _values(spread, place)
    if spread.plan.zero:
        values /= spread.keepers if spread.plan.zero >= 2 else spread.data
    return tensors * optimizer.fixed + values * optimizer.per_value
