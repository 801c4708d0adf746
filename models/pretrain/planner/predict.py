"""Predicts the seconds of a step under a plan, by category. Pure arithmetic over a profile.

    micro-batches through pieces, tp, cp and ep exchanges in every layer -> bubble -> gradients over dp -> optimizer

Which communication is exposed depends on the trainer: DistributedDataParallel and `gradient_sums` exchange buckets of
gradients while the backward pass of the last micro-batch goes on, so what is left when it ends is exposed; FSDP2 gathers
every layer's params before use. With `sync_every`, nothing is exchanged in a step, and after so many of them all params, which nothing
hides. `grad_compression` to 16 bits halves what buckets send; what `powersgd` and `onebit` send and compute is not known here, so
they count as uncompressed. Without an idle core nothing hides the part of an exchange that a processor works on, which is
what it would take inside a host; only waiting for a slower network is hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from models.pretrain.parallel.data import buckets
from models.pretrain.parallel.model.pipeline_schedule import Pass, Run, simulate
from models.pretrain.plan import ParallelPlan
from models.pretrain.planner import collective_cost
from models.pretrain.planner.collective_cost import Cost, Link
from models.pretrain.planner.placement import VALUE_BYTES, Placement
from models.pretrain.planner.profile import Piece, Profile

SIMULATED = 4096
"""Largest number of passes to simulate; longer pipelines are estimated."""

_SENT = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 1.0, "onebit": 1.0}
"""Bytes that a bucket of gradients is sent in, relative to its own."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step of the slowest process, on average over steps.

    Attributes:
        parts: by category: compute, tp, cp, ep, bubble, dp, optimizer, other.
    """

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)


class Parts(dict[str, float]):
    """Seconds by category; missing ones are 0."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def merge(self, other: Mapping[str, float]) -> None:
        for name, seconds in other.items():
            self[name] += seconds


def predict(plan: ParallelPlan, profile: Profile, batch_size: int) -> Prediction:
    """The prediction for one step of `batch_size` rows."""
    placement = Placement(plan, profile, batch_size)
    slow = profile.machine.slower(placement.per_host)
    parts = Parts()
    run = _pipelined(placement, parts) if plan.pp > 1 else _in_turn(placement, parts, slow)
    worst = max(range(plan.pp), key=lambda place: _values(placement, place))
    if plan.sync_every:
        parts["dp"] += _synchronized(placement, worst)
    else:
        parts["dp"] += (
            _sharded(placement, worst, parts["compute"]) if plan.zero >= 2 else _summed(placement, run)
        )
    parts["optimizer"] += _optimizer(placement, worst) * slow
    used = uses(plan, profile)
    per_step = sum(used[name] * profile.overhead.get(name, 0.0) for name in ("ddp", "sums", "zero2", "zero3"))
    parts["other"] += (profile.step + per_step) * slow
    return Prediction(sum(parts.values()), {name: seconds for name, seconds in parts.items() if seconds})


def uses(plan: ParallelPlan, profile: Profile) -> Counter[str]:
    """How often a step uses each mechanism with an overhead of its own, on the process that uses it most:

    tp, cp, ep: per layer and micro-batch; stage, stages, halves: per stage and micro-batch of schedules with one stage a
    process, several, several and halved backward passes; loss: per micro-batch whose loss tp ranks share; ddp, sums: per
    step whose gradients DistributedDataParallel or `gradient_sums` exchanges; zero2, zero3: per unit of params gathered.
    """
    layers = -(-len(profile.layers) // plan.pp)
    used: Counter[str] = Counter()
    for name in ("tp", "cp", "ep"):
        if getattr(plan, name) > 1:
            used[name] = layers * plan.num_microbatches
    if plan.loss_parallel:
        used["loss"] = plan.num_microbatches
    if plan.pp > 1:
        used[_stage_kind(plan)] = plan.num_microbatches * plan.stages_per_rank
    if plan.dp * plan.cp > 1 and not plan.sync_every:
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
    return plan.num_microbatches * (2 if plan.zero == 3 else 1)


def _in_turn(placement: Placement, parts: Parts, slow: float) -> Run:
    """Adds the seconds of passes through the whole model, `slow` times those on a process with its own core."""
    count, seconds = placement.plan.num_microbatches, 0.0
    for backward in (False, True):
        one = _pass(placement, placement.stages()[0], True, backward)
        one = Parts(
            {name: took * (slow if name in ("compute", "other") else 1) for name, took in one.items()}
        )
        parts.merge({name: count * took for name, took in one.items()})
        seconds = sum(one.values())
    total = sum(parts.values())
    return Run(total, (total,), {0: (total - seconds, total)})


def _pass(placement: Placement, pieces: list[Piece], last: bool, backward: bool) -> Parts:
    plan, rows, overhead = placement.plan, placement.rows, placement.profile.overhead
    parts = Parts()
    for piece in pieces:
        seconds = piece.backward[placement.policy(piece)] if backward else piece.forward
        parts["compute"] += seconds.at(rows, plan.tp)
        _exchange(parts, placement, piece, backward)
        if placement.is_layer(piece):
            for name in ("tp", "cp", "ep"):
                if getattr(plan, name) > 1:
                    parts["other"] += overhead.get(name, 0.0) / 2
    if last:
        loss = placement.profile.loss
        seconds = loss.backward["none"] if backward else loss.forward
        parts["compute"] += seconds.at(rows, placement.loss_tp())
        if plan.loss_parallel:
            parts["other"] += overhead.get("loss", 0.0) / 2
        if plan.tp > 1 and not plan.loss_parallel and not backward:
            logits = placement.profile.last.output_bytes * rows
            parts["tp"] += collective_cost.all_gather(plan.tp, logits).seconds(placement.link("tp"))
    return parts


def _exchange(parts: Parts, placement: Placement, piece: Piece, backward: bool) -> None:
    """Adds the exchanges of tp, cp and ep ranks in one pass of a piece. Inner activations are as large as its output."""
    plan, size = placement.plan, piece.output_bytes * placement.rows
    # a recomputed forward pass exchanges again
    again = 2 if backward and placement.policy(piece) == "full" else 1
    if plan.tp > 1:
        forward = piece.rows * collective_cost.all_reduce(plan.tp, size).seconds(placement.link("tp"))
        back = piece.columns * collective_cost.all_reduce(plan.tp, size).seconds(placement.link("tp"))
        parts["tp"] += back + (again - 1) * forward if backward else forward
    if plan.cp > 1:
        # query, key, value and the attention's output; heads of a tp rank only
        one = collective_cost.all_to_all(plan.cp, size / plan.tp).seconds(placement.link("cp"))
        parts["cp"] += 4 * again * piece.attentions * one
    if plan.ep > 1:
        one = collective_cost.all_to_all(plan.ep, size).seconds(placement.link("ep"))
        parts["ep"] += 2 * again * piece.experts * one


def _pipelined(placement: Placement, parts: Parts) -> Run:
    """Adds the seconds of the passes on the busiest rank along pp, and of its waiting for others."""
    plan = placement.plan
    stages = placement.stages()
    extra = placement.profile.overhead.get(_stage_kind(plan), 0.0)
    passes = [
        [_pass(placement, pieces, number == len(stages) - 1, backward) for backward in (False, True)]
        for number, pieces in enumerate(stages)
    ]
    forward = [sum(forward.values()) + extra / 2 for forward, _ in passes]
    backward = [sum(backward.values()) + extra / 2 for _, backward in passes]
    send = [
        collective_cost.send(pieces[-1].output_bytes * placement.rows).seconds(placement.send_link(number))
        for number, pieces in enumerate(stages[:-1])
    ]
    totals = []
    for place in range(plan.pp):
        work = Parts()
        for stage in placement.plan.stage_numbers(place):
            for part in passes[stage]:
                work.merge(part)
            work["other"] += extra
        totals.append(Parts({name: plan.num_microbatches * value for name, value in work.items()}))
    place = max(range(plan.pp), key=lambda place: sum(totals[place].values()))
    busiest = totals[place]
    alone = sum(busiest.values())
    run = _run(placement, forward, backward, send)
    seconds, busy = run.seconds, run.busy[place]
    busiest["compute"] += busy - alone  # from sharing cores
    busiest["bubble"] = max(0.0, seconds - busy)
    parts.merge(busiest)
    return run


def _run(
    placement: Placement, forward: Sequence[float], backward: Sequence[float], send: Sequence[float]
) -> Run:
    """One step of a pipeline: simulated, or, where it is long, estimated.

    The estimate is the slowest rank's work plus its idle time at both ends, (p - 1) / v of its micro-batches with v
    stages a rank, a third of that with halved passes.

    Args:
        forward, backward: seconds of one micro-batch, by stage, on a process with its own core.
        send: seconds to send the output of stage s to stage s + 1, or its gradient back.
    """
    plan = placement.plan
    if plan.virtual_stages * plan.num_microbatches <= SIMULATED:

        def seconds(this: Pass) -> float:
            if this.kind == "F":
                return forward[this.stage]
            return backward[this.stage] * (1.0 if this.kind == "B" else 0.5)

        return simulate(plan, seconds, send.__getitem__, placement.slower)
    work = [
        sum(forward[stage] + backward[stage] for stage in plan.stage_numbers(place))
        for place in range(plan.pp)
    ]
    busy = [
        plan.num_microbatches * seconds * placement.slower(place, [True] * plan.pp)
        for place, seconds in enumerate(work)
    ]
    third = 3 if plan.schedule in ("zero-bubble", "zbv") else 1
    empty = (plan.pp - 1) / plan.stages_per_rank / third / plan.num_microbatches
    if plan.schedule == "naive":
        empty = plan.pp - 1.0
    total = max(busy) * (1 + empty) + 2 * sum(send)
    last: dict[int, tuple[float, float]] = {}
    for place in range(plan.pp):
        end, slow = total, placement.slower(place, [True] * plan.pp)
        for stage in sorted(plan.stage_numbers(place)):
            last[stage] = end - backward[stage] * slow, end
            end = last[stage][0]
    return Run(total, tuple(busy), last)


def _values(placement: Placement, place: int) -> float:
    """Parameters of the rank at `place` along pp, before zero shards them."""
    stages = placement.stages()
    return sum(placement.values(stages[stage]) for stage in placement.plan.stage_numbers(place))


def _synchronized(placement: Placement, place: int) -> float:
    """A step's share of the exchange of all params."""
    if placement.data == 1:
        return 0.0
    size = _values(placement, place) * VALUE_BYTES
    exchange = collective_cost.all_reduce(placement.data, size).seconds(placement.link("data"))
    return exchange / placement.plan.sync_every


def _summed(placement: Placement, run: Run) -> float:
    """Exposed time to sum gradients that every process of the data axis has, and to send params that zero=1 stepped.

    Each rank along pp begins when its own gradients come, while others still compute.
    """
    plan, n, link = placement.plan, placement.data, placement.link("data")
    if n == 1:
        return 0.0
    occupied, over, published = [], [], []
    for place in range(plan.pp):
        end = _end(plan, place, run)
        processor, rest = 0.0, []
        for some in _buckets(placement, place, run):
            all_reduce = collective_cost.all_reduce(some.processes, some.bytes * _SENT[plan.grad_compression])
            busy = _occupied(placement, all_reduce, link)
            processor += some.count * busy
            seconds = all_reduce.seconds(link) - busy
            rest.append((end - some.first, end - some.last, some.count, seconds))
        occupied.append(processor)
        over.append(end + collective_cost.exposed(rest))
        size = _values(placement, place) * VALUE_BYTES
        published.append(collective_cost.all_gather(n, size).seconds(link) if plan.zero == 1 else 0.0)
    return max(occupied) + max(0.0, max(over) - run.seconds) + max(published)


@dataclass(frozen=True)
class _Buckets:
    """`count` buckets of `bytes` each, summed by `processes`; complete at equal intervals from `first` to `last` of a `Run`."""

    first: float
    last: float
    count: int
    bytes: float
    processes: int


def _buckets(placement: Placement, place: int, run: Run) -> Iterator[_Buckets]:
    """The buckets of a rank along pp, in the order in which they are exchanged.

    Gradients of a piece come evenly while it computes; those of expert shards, and with schedules that halve backward
    passes all of them, are exchanged after the passes.
    """
    plan, n, end = placement.plan, placement.data, _end(placement.plan, place, run)
    halved = plan.pp > 1 and _stage_kind(plan) == "halves"
    experts = total = 0.0
    for stage in plan.stage_numbers(place):
        for piece in placement.stages()[stage]:
            experts += piece.expert_values / plan.ep * VALUE_BYTES if plan.ep > 1 else 0.0
            total += placement.values([piece]) * VALUE_BYTES
    full, filled = buckets.limit(total - experts), 0.0
    for stage in sorted(plan.stage_numbers(place), reverse=True):
        for size, began, ended in _gradients(placement, stage, run):
            count, left = divmod(filled + size, full)
            if count:
                pace = (ended - began) / size
                first, last = began + pace * (full - filled), ended - pace * left
                yield _Buckets(*((end, end) if halved else (first, last)), int(count), full, n)
            filled = left
    if filled:
        yield _Buckets(end, end, 1, filled, n)
    if experts:
        yield _Buckets(end, end, 1, experts, n // plan.ep)


def _gradients(placement: Placement, stage: int, run: Run) -> Iterator[tuple[float, float, float]]:
    """(bytes, when the first come, and the last) of every piece of a stage, last piece first, without expert shards."""
    plan, pieces, (began, ended) = placement.plan, placement.stages()[stage], run.last[stage]
    nominal = _pass(placement, pieces, stage == plan.virtual_stages - 1, True)
    slow = (ended - began) / max(1e-12, sum(nominal.values()))
    seconds = [piece.backward[placement.policy(piece)].at(placement.rows, plan.tp) * slow for piece in pieces]
    now = ended - sum(seconds)
    for piece, took in zip(reversed(pieces), reversed(seconds), strict=True):
        shards = piece.expert_values / plan.ep if plan.ep > 1 else 0.0
        yield (placement.values([piece]) - shards) * VALUE_BYTES, now, now + took
        now += took


def _end(plan: ParallelPlan, place: int, run: Run) -> float:
    """When the last pass of a rank along pp that computes gradients of weights ends."""
    return max(run.last[stage][1] for stage in plan.stage_numbers(place))


def _occupied(placement: Placement, cost: Cost, link: Link) -> float:
    """Seconds in which an exchange keeps a core from computing, because none is idle."""
    machine = placement.profile.machine
    if machine.device != "cpu" or placement.per_host < machine.cores:
        return 0.0
    return min(cost.seconds(link), cost.seconds(placement.inside))


def _sharded(placement: Placement, place: int, compute: float) -> float:
    """Exposed time to gather params that are sharded, and to scatter their gradients."""
    plan = placement.plan
    if placement.data == 1:
        return 0.0
    stages, n, kept = placement.stages(), placement.param_shards, placement.link("fsdp")
    size = _values(placement, place) * VALUE_BYTES
    units = [
        placement.values([piece]) * VALUE_BYTES
        for stage in placement.plan.stage_numbers(place)
        for piece in stages[stage]
        if placement.is_layer(piece)
    ]
    units.append(max(0.0, size - sum(units)))
    costs = [(collective_cost.all_gather(n, unit), _gathers(plan), kept) for unit in units]
    scatters = plan.num_microbatches if plan.zero == 3 else 1
    costs += [(collective_cost.reduce_scatter(n, unit), scatters, kept) for unit in units]
    if plan.replicate > 1:
        summed = collective_cost.all_reduce(plan.replicate, size / n)
        costs.append((summed, scatters, placement.link("replicate")))
    whole = sum(times * cost.seconds(link) for cost, times, link in costs)
    occupied = sum(times * _occupied(placement, cost, link) for cost, times, link in costs)
    # the first gather and the last scatter have nothing to hide behind
    gather, scatter = collective_cost.all_gather(n, units[-1]), collective_cost.reduce_scatter(n, units[0])
    least = gather.seconds(kept) + scatter.seconds(kept)
    return max(occupied + max(0.0, whole - occupied - compute), least)


def _optimizer(placement: Placement, place: int) -> float:
    optimizer, stages = placement.profile.optimizer, placement.stages()
    tensors = sum(piece.tensors for stage in placement.plan.stage_numbers(place) for piece in stages[stage])
    values = _values(placement, place)
    if placement.plan.zero:
        values /= placement.param_shards if placement.plan.zero >= 2 else placement.data
    return tensors * optimizer.fixed + values * optimizer.per_value
