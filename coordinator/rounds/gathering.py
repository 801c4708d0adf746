"""Gathering: the answers of a cohort become one aggregate, which none of them decides alone.

    1. fold each accepted update as it is told; nobody weighs more than the round's weight limit
    2. at the end, hold the updates against each other: is one out of all proportion?
    3. if so, fold once more without it: the fleet tells its results again, the same

So a fold never holds more than it must, and what was folded never has to be taken back out of a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from coordinator.fleets.fleet import Answer, Fleet, Model, Reopened
from coordinator.rounds import intake
from coordinator.rounds.events import Emit
from coordinator.rounds.outliers import Limits, Measured, Outlier, measured, outliers
from coordinator.rounds.plan import RunPlan
from strategies.lazy import l2_norm, picked
from strategies.params import Tensors
from strategies.strategy import Strategy
from strategies.update import Aggregate, Update

OUTLIER = "outlier"
"""Counted among the rejections, though the device heard `accepted`: what it is held against was not there yet."""

MOST_TRAIN_LOSS = 1e6
"""What a client's training loss counts for at most in the round's mean, so that one cannot make it infinite."""


@dataclass(frozen=True)
class Gathered:
    """What a cohort's answers came to. `norms`: of the accepted updates by client, the largest first."""

    aggregate: Aggregate | None
    accepted: tuple[str, ...]
    rejections: Mapping[str, int]
    silent: int
    bytes_up: int
    norms: Mapping[str, float]


@dataclass(frozen=True)
class _Heard:
    """One listening. `found`: all accepted updates by position; `folded`: the clients of those that went in."""

    aggregate: Aggregate | None
    found: Mapping[int, Measured]
    folded: tuple[str, ...]
    answered: Collection[int]
    rejections: Mapping[str, int]
    bytes_up: int


def gather(run_plan: RunPlan, fleet: Fleet, asked: Reopened, model: Model, emit: Emit) -> Gathered:
    """What came of the round that was submitted; every event is told once."""
    limits = Limits(
        factor=run_plan.outlier_factor,
        params_norm=cache(lambda: l2_norm(trained(run_plan, model.params))),
        rule=run_plan.strategy.client_rule,
        lr=run_plan.local.lr,
        broadcast=model.streams,
    )
    listen = partial(_listen, run_plan.strategy, fleet, len(asked.tasks), asked.weight_limit)
    heard = listen({}, emit)
    left_out: dict[int, Outlier] = {}
    while new := {at: each for at, each in outliers(heard.found, limits).items() if at not in left_out}:
        left_out |= new
        heard = listen(left_out, _told_before)
    left_out = {at: each for at, each in left_out.items() if at in heard.found}
    for at, outlier in sorted(left_out.items()):
        about = {"round": asked.tasks[at].message.round, "client": outlier.client}
        emit("update_excluded", **about, reason=OUTLIER, **outlier.figures())
    fleet.cancel([task for task in asked.tasks if task.position not in heard.answered])
    norms = {each.client: each.norm for at, each in heard.found.items() if at not in left_out}
    return Gathered(
        aggregate=heard.aggregate,
        accepted=heard.folded,
        rejections=dict(sorted({**heard.rejections, **_count(OUTLIER, len(left_out))}.items())),
        silent=len(asked.tasks) - len(heard.answered),
        bytes_up=heard.bytes_up,
        norms=dict(sorted(norms.items(), key=lambda item: -item[1])),
    )


def trained(run_plan: RunPlan, params: Tensors) -> Tensors:
    """Of these params those that clients train."""
    return picked({name: (params, name) for name in run_plan.trainable})


def _listen(
    strategy: Strategy,
    fleet: Fleet,
    cohort_size: int,
    weight_limit: int | None,
    left_out: Collection[int],
    emit: Emit,
) -> _Heard:
    """Results folded as they arrive, until the fleet has no more to tell."""
    fold = strategy.start(cohort_size)
    found: dict[int, Measured] = {}
    folded: list[str] = []
    answered: set[int] = set()
    rejections: Counter[str] = Counter()
    bytes_up = 0
    for result in fleet.results():
        at, client = result.task.position, result.task.message.client
        about = {"round": result.task.message.round, "client": client}
        if not isinstance(result, Answer):
            emit("client_silent", **about, reason=result.reason)
            continue
        answered.add(at)
        bytes_up += result.payload_bytes
        if isinstance(result.verdict, intake.Rejection):
            rejections[result.verdict.reason] += 1
            emit("update_rejected", **about, reason=result.verdict.reason, words=result.verdict.words)
            continue
        emit("update_accepted", **about, seconds=result.seconds)
        found[at] = measured(client, result.verdict)
        if at in left_out:
            continue
        counted = _counted(result.verdict, weight_limit)
        if counted.num_examples < result.verdict.num_examples:
            told = {"examples": result.verdict.num_examples, "counted": counted.num_examples}
            emit("weight_capped", **about, **told)
        fold.add(at, strategy.transform(counted))
        folded.append(client)
    aggregate = fold.finish() if folded else None
    return _Heard(aggregate, found, tuple(folded), answered, rejections, bytes_up)


def _counted(update: Update, weight_limit: int | None) -> Update:
    """The update with the examples and the training loss that count."""
    examples = update.num_examples if weight_limit is None else min(update.num_examples, weight_limit)
    loss = min(max(update.train_loss, -MOST_TRAIN_LOSS), MOST_TRAIN_LOSS)
    if (examples, loss) == (update.num_examples, update.train_loss):
        return update
    return replace(update, num_examples=examples, train_loss=loss)


def _count(reason: str, count: int) -> Mapping[str, int]:
    return {reason: count} if count else {}


def _told_before(event: str, **values: Any) -> None:
    """Results that are told again are no news."""
