"""Aggregation: folds the updates of a cohort into one aggregate that no single client can dominate.

    1. fold each accepted update as it arrives; no update weighs more than the round's weight limit.
       A fleet may fold a block of them itself, by the same rules (`fleet.BlockSum`)
    2. at the end compare the updates: is one out of all proportion?
    3. if so, fold once more without it: the fleet repeats its results

Memory is bounded by the fold, and no update is ever subtracted from a sum again.

An update is an outlier if both hold:

    its step length, norm / steps, is more than `factor` times the median one of the other updates
    its norm is larger than that of all params that are trained

Each alone occurs in honest training: a new site among converged ones takes steps a thousand times as long as theirs, and
a model that starts at zero has no norm. Both together would replace the model. If a task specifies epochs, the number of
steps is the client's own claim, so no client counts for more than `MAX_STEP_RATIO` times the median.

Further streams of a client rule, such as SCAFFOLD's control variates, follow from the delta. A stream is out of proportion
if it is `factor` times as long as the delta implies, and as an addition to the gradient would move the model by more than
its norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median_low
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator.rounds import intake
from coordinator.rounds.events import Emit, emit_each
from coordinator.rounds.fleet import (
    Accepted,
    Answer,
    BlockSum,
    Fleet,
    Measured,
    Model,
    OpenRound,
    Result,
)
from coordinator.rounds.gathered import Aggregated
from coordinator.rounds.plan import RunPlan
from strategies.client_rules import ClientRule
from strategies.cohort_fold import TooFewUpdates
from strategies.params import Tensors, l2_norm, select
from strategies.relays import GroupedFold, GroupedRule, RelayedMeanFold, RelayedRuleFold
from strategies.strategy import Fold, Strategy
from strategies.summation import clamp
from strategies.update import Aggregate, GroupMean, RelayPart, Update

if TYPE_CHECKING:
    from coordinator.rounds.trace import RoundTrace

OUTLIER = "outlier"
"""Counted as a rejection, though the device was told `accepted`: the updates to compare with had not arrived yet."""

MAX_STEP_RATIO = 10


@dataclass(frozen=True)
class _Pass:
    """One pass over the results.

    Attributes:
        norms: of all accepted updates by position.
        folded: clients in the aggregate.
        missing: why the accepted updates give no aggregate.
    """

    aggregate: Aggregate | None
    norms: Mapping[int, UpdateNorms]
    folded: tuple[str, ...]
    answered: Collection[int]
    rejections: Mapping[str, int]
    answers: int
    bytes_up: int
    received_bytes: int
    missing: str = ""


def aggregate_round(
    run_plan: RunPlan,
    fleet: Fleet,
    opened: OpenRound,
    model: Model,
    emit: Emit,
    trace: RoundTrace | None = None,
) -> Aggregated:
    """The aggregate of the submitted round; emits every event once. `trace`: gets every result."""
    bounds = Bounds(
        factor=run_plan.outlier_factor,
        params_norm=cache(lambda: l2_norm(select_trained(run_plan, model.params))),
        rule=run_plan.strategy.client_rule,
        lr=run_plan.local.lr,
        broadcast=model.streams,
    )
    results = fleet.results if trace is None else trace.watch(fleet.results)
    fold = partial(_fold_results, run_plan.strategy, results, len(opened.tasks), opened.weight_limit)
    last = fold({}, emit)
    excluded: dict[int, Outlier] = {}
    while new := {at: each for at, each in find_outliers(last.norms, bounds).items() if at not in excluded}:
        excluded |= new
        last = fold(excluded, _ignore)
    excluded = {at: each for at, each in excluded.items() if at in last.norms}
    for at, outlier in sorted(excluded.items()):
        where = {"round": opened.tasks[at].message.round, "client": outlier.client}
        emit("update_excluded", **where, reason=OUTLIER, **outlier.figures())
    if opened.tasks:
        _emit_relays(last, run_plan.strategy, opened.tasks[0].message.round, emit)
    if len(last.answered) < len(opened.tasks):
        fleet.cancel([task for task in opened.tasks if task.position not in last.answered])
    norms = {each.client: each.norm for at, each in last.norms.items() if at not in excluded}
    rejections = {**last.rejections, **({OUTLIER: len(excluded)} if excluded else {})}
    return Aggregated(
        aggregate=last.aggregate,
        accepted=last.folded,
        rejections=dict(sorted(rejections.items())),
        silent=len(opened.tasks) - len(last.answered),
        answers=last.answers,
        bytes_up=last.bytes_up,
        received_bytes=last.received_bytes,
        norms=dict(sorted(norms.items(), key=lambda item: -item[1])),
    )


def select_trained(run_plan: RunPlan, params: Tensors) -> Tensors:
    """The params that clients train."""
    return select({name: (params, name) for name in run_plan.trainable})


def _fold_results(
    strategy: Strategy,
    results: Callable[[Collection[int]], Iterator[Result]],
    cohort_size: int,
    weight_limit: int | None,
    excluded: Collection[int],
    emit: Emit,
) -> _Pass:
    """Folds results as they arrive, until the fleet has no more."""
    fold = strategy.start(cohort_size)
    norms: dict[int, UpdateNorms] = {}
    folded: list[str] = []
    answered: set[int] = set()
    rejections: Counter[str] = Counter()
    answers = bytes_up = received = 0
    for result in results(excluded):
        if isinstance(result, BlockSum | RelayPart | GroupMean):
            _add_folded(fold, result)
            continue
        if isinstance(result, Accepted):
            answered.update(result.positions)
            answers += len(result.positions)
            bytes_up += sum(result.payload_bytes)
            norms.update(zip(result.positions, _measure_each(result), strict=True))
            folded += _emit_accepted(result, weight_limit, excluded, emit)
            continue
        at, client = result.task.position, result.task.message.client
        where = {"round": result.task.message.round, "client": client}
        if not isinstance(result, Answer):
            emit("client_silent", **where, reason=result.reason)
            continue
        answered.add(at)
        answers += 1
        bytes_up += result.payload_bytes
        received += result.received_bytes
        verdict = result.verdict
        if isinstance(verdict, intake.Rejection):
            rejections[verdict.reason] += 1
            emit("update_rejected", **where, reason=verdict.reason, words=verdict.message)
            continue
        emit("update_accepted", **where, seconds=result.seconds)
        norms[at] = measure(client, verdict)
        if at in excluded:
            continue
        if weight_limit is not None and weight_limit < verdict.num_examples:
            emit("weight_capped", **where, examples=verdict.num_examples, counted=weight_limit)
        if isinstance(verdict, Update):
            fold.add(at, strategy.transform(clamp(verdict, weight_limit)))
        folded.append(client)
    aggregate, missing = None, ""
    if len(folded) >= strategy.aggregator.fewest_updates:
        try:
            aggregate = fold.finish()
        except TooFewUpdates as error:
            missing = str(error)
    return _Pass(aggregate, norms, tuple(folded), answered, rejections, answers, bytes_up, received, missing)


def _add_folded(fold: Fold, result: BlockSum | RelayPart | GroupMean) -> None:
    """Adds what was folded elsewhere."""
    if isinstance(result, BlockSum):
        fold.add_partial(result.block, result.partial, result.last_block)
    elif isinstance(result, RelayPart):
        assert isinstance(fold, RelayedMeanFold | RelayedRuleFold)
        fold.add_part(result)
    else:
        assert isinstance(fold, GroupedFold)
        fold.add_group(result)


def _emit_accepted(
    result: Accepted, weight_limit: int | None, excluded: Collection[int], emit: Emit
) -> list[str]:
    """Emits that these updates were accepted; returns the clients whose updates are not excluded."""
    where = {"round": result.tasks[result.positions[0]].message.round}
    emit_each(emit, "update_accepted", where, client=result.clients, seconds=result.seconds)
    kept = [at for at, position in enumerate(result.positions) if position not in excluded]
    if weight_limit is not None and weight_limit < max(result.num_examples):
        for at in kept:
            if weight_limit < (examples := result.num_examples[at]):
                emit(
                    "weight_capped",
                    **where,
                    client=result.clients[at],
                    examples=examples,
                    counted=weight_limit,
                )
    return [result.clients[at] for at in kept]


def _emit_relays(last: _Pass, strategy: Strategy, number: int, emit: Emit) -> None:
    """What each relay has passed on, or why they, or the groups, have passed on too little."""
    if last.missing:
        grouped = isinstance(strategy.aggregator, GroupedRule)
        emit("groups_incomplete" if grouped else "relays_incomplete", round=number, words=last.missing)
    for relay, each in enumerate(last.aggregate.relays if last.aggregate else ()):
        values = {"updates": each.num_updates, "sums": each.num_sums, "bytes": each.payload_bytes}
        emit("relay_folded", round=number, relay=relay, **values)


def _ignore(event: str, **values: Any) -> None:
    """Drops events of a repeated pass."""


class UpdateNorms(NamedTuple):
    """Norms of an accepted update. `norm`: L2 norm of the delta; `streams`: L2 norms of the other streams."""

    client: str
    norm: float
    num_steps: int
    streams: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Outlier:
    """Why an update is excluded: which stream is too long, its norm, and the limit."""

    client: str
    what: str
    norm: float
    limit: float

    def figures(self) -> dict[str, str | float]:
        """Values of the `update_excluded` event."""
        return {"what": self.what, "norm": self.norm, "limit": self.limit}


@dataclass(frozen=True)
class Bounds:
    """What one round's updates are compared with.

    Attributes:
        factor: 0: nothing is an outlier.
        params_norm: returns the L2 norm of the trained params; called only if it decides.
        broadcast: the client rule's streams as they were sent.
    """

    factor: float
    params_norm: Callable[[], float]
    rule: ClientRule
    lr: float
    broadcast: Mapping[str, Tensors] = field(default_factory=dict)


def measure(client: str, update: Update | Measured) -> UpdateNorms:
    """The norms of an accepted update, unless its fleet has measured them already."""
    measured = update if isinstance(update, Measured) else Measured.of(update)
    return UpdateNorms(client, measured.norm, measured.num_steps, measured.streams)


def _measure_each(accepted: Accepted) -> Iterator[UpdateNorms]:
    return map(UpdateNorms, accepted.clients, accepted.norms, accepted.num_steps)


def find_outliers(norms: Mapping[int, UpdateNorms], bounds: Bounds) -> dict[int, Outlier]:
    """The outliers of a round's accepted updates by position. A single update is never an outlier."""
    if not bounds.factor or len(norms) < 2:
        return {}
    positions = sorted(norms)
    median_steps = median_low(norms[position].num_steps for position in positions)
    steps = [min(norms[position].num_steps, MAX_STEP_RATIO * median_steps) for position in positions]
    lengths = [norms[position].norm / count for position, count in zip(positions, steps, strict=True)]
    broadcast = {name: l2_norm(tensors) for name, tensors in bounds.broadcast.items()}
    outliers: dict[int, Outlier] = {}
    for position, count, median in zip(positions, steps, medians_of_others(lengths), strict=True):
        each, limit = norms[position], bounds.factor * median * count
        if each.norm <= limit and not each.streams:
            continue
        outlier = _long_delta(each, bounds, limit) or _long_stream(each, bounds, broadcast, median_steps)
        if outlier is not None:
            outliers[position] = outlier
    return outliers


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the (lower) median of all others. Needs at least two values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 2) // 2
    medians = [0.0] * len(values)
    for rank, index in enumerate(order):
        medians[index] = values[order[middle if rank > middle else middle + 1]]
    return medians


def _long_delta(each: UpdateNorms, bounds: Bounds, limit: float) -> Outlier | None:
    if each.norm <= limit or each.norm <= bounds.params_norm():
        return None
    return Outlier(each.client, "delta", each.norm, max(limit, bounds.params_norm()))


def _long_stream(
    each: UpdateNorms, bounds: Bounds, broadcast: Mapping[str, float], steps: int
) -> Outlier | None:
    for name, norm in each.streams.items():
        implied = bounds.rule.stream_norm(broadcast.get(name, 0.0), each.norm, each.num_steps, bounds.lr)
        limit = bounds.factor * implied
        if norm > limit and norm * bounds.lr * steps > bounds.params_norm():
            return Outlier(each.client, name, norm, max(limit, bounds.params_norm() / (bounds.lr * steps)))
    return None
