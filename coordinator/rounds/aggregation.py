"""Aggregation: folds the updates of a cohort into one aggregate that no single client can dominate.

    1. fold each accepted update as it arrives; no update weighs more than the round's weight limit
    2. at the end compare the updates: is one out of all proportion?
    3. if so, fold once more without it: the fleet repeats its results

Memory is bounded by the fold, and no update is ever subtracted from a sum again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from coordinator.rounds import intake
from coordinator.rounds.events import Emit
from coordinator.rounds.fleet import (
    Answer,
    Fleet,
    Model,
    OpenRound,
)
from coordinator.rounds.outliers import Bounds, Outlier, UpdateNorms, find_outliers, measure
from coordinator.rounds.plan import RunPlan
from strategies.lazy import l2_norm, select
from strategies.params import Tensors
from strategies.strategy import Strategy
from strategies.update import Aggregate, Update

OUTLIER = "outlier"
"""Counted as a rejection, though the device was told `accepted`: the updates to compare with had not arrived yet."""

MAX_TRAIN_LOSS = 1e6
"""A client's training loss is clamped to this in the round's mean, so that one client cannot make the mean infinite."""


@dataclass(frozen=True)
class Aggregated:
    """The aggregate of a cohort's answers. `norms`: of the accepted updates by client, the largest first."""

    aggregate: Aggregate | None
    accepted: tuple[str, ...]
    rejections: Mapping[str, int]
    silent: int
    bytes_up: int
    norms: Mapping[str, float]


@dataclass(frozen=True)
class _Pass:
    """One pass over the results. `norms`: of all accepted updates by position; `folded`: clients in the aggregate."""

    aggregate: Aggregate | None
    norms: Mapping[int, UpdateNorms]
    folded: tuple[str, ...]
    answered: Collection[int]
    rejections: Mapping[str, int]
    bytes_up: int


def aggregate_round(
    run_plan: RunPlan, fleet: Fleet, opened: OpenRound, model: Model, emit: Emit
) -> Aggregated:
    """The aggregate of the submitted round; emits every event once."""
    bounds = Bounds(
        factor=run_plan.outlier_factor,
        params_norm=cache(lambda: l2_norm(select_trained(run_plan, model.params))),
        rule=run_plan.strategy.client_rule,
        lr=run_plan.local.lr,
        broadcast=model.streams,
    )
    fold = partial(_fold_results, run_plan.strategy, fleet, len(opened.tasks), opened.weight_limit)
    last = fold({}, emit)
    excluded: dict[int, Outlier] = {}
    while new := {at: each for at, each in find_outliers(last.norms, bounds).items() if at not in excluded}:
        excluded |= new
        last = fold(excluded, _ignore)
    excluded = {at: each for at, each in excluded.items() if at in last.norms}
    for at, outlier in sorted(excluded.items()):
        where = {"round": opened.tasks[at].message.round, "client": outlier.client}
        emit("update_excluded", **where, reason=OUTLIER, **outlier.figures())
    fleet.cancel([task for task in opened.tasks if task.position not in last.answered])
    norms = {each.client: each.norm for at, each in last.norms.items() if at not in excluded}
    rejections = {**last.rejections, **({OUTLIER: len(excluded)} if excluded else {})}
    return Aggregated(
        aggregate=last.aggregate,
        accepted=last.folded,
        rejections=dict(sorted(rejections.items())),
        silent=len(opened.tasks) - len(last.answered),
        bytes_up=last.bytes_up,
        norms=dict(sorted(norms.items(), key=lambda item: -item[1])),
    )


def select_trained(run_plan: RunPlan, params: Tensors) -> Tensors:
    """The params that clients train."""
    return select({name: (params, name) for name in run_plan.trainable})


def _fold_results(
    strategy: Strategy,
    fleet: Fleet,
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
    bytes_up = 0
    for result in fleet.results():
        at, client = result.task.position, result.task.message.client
        where = {"round": result.task.message.round, "client": client}
        if not isinstance(result, Answer):
            emit("client_silent", **where, reason=result.reason)
            continue
        answered.add(at)
        bytes_up += result.payload_bytes
        verdict = result.verdict
        if isinstance(verdict, intake.Rejection):
            rejections[verdict.reason] += 1
            emit("update_rejected", **where, reason=verdict.reason, words=verdict.message)
            continue
        emit("update_accepted", **where, seconds=result.seconds)
        norms[at] = measure(client, verdict)
        if at in excluded:
            continue
        update = _clamp(verdict, weight_limit)
        if update.num_examples < verdict.num_examples:
            emit("weight_capped", **where, examples=verdict.num_examples, counted=update.num_examples)
        fold.add(at, strategy.transform(update))
        folded.append(client)
    aggregate = fold.finish() if folded else None
    return _Pass(aggregate, norms, tuple(folded), answered, rejections, bytes_up)


def _clamp(update: Update, weight_limit: int | None) -> Update:
    """The update with its number of examples and its training loss within bounds."""
    examples = update.num_examples if weight_limit is None else min(update.num_examples, weight_limit)
    loss = min(max(update.train_loss, -MAX_TRAIN_LOSS), MAX_TRAIN_LOSS)
    if (examples, loss) == (update.num_examples, update.train_loss):
        return update
    return replace(update, num_examples=examples, train_loss=loss)


def _ignore(event: str, **values: Any) -> None:
    """Drops events of a repeated pass."""
