"""The round engine: one federated training as a sequence of committed rounds.

It knows no transport and no framework. A fleet carries tasks and results, a strategy computes, an
evaluator scores, a commit makes the round durable; the engine says in which order.

    1. choose a cohort            4. fold the accepted updates, move the params
    2. submit its tasks           5. evaluate
    3. hear what the fleet        6. commit
       accepted and rejected,
       until quorum or deadline
       (`rounds.gathering`)

A round that came to no model of numbers, or to too few updates, leaves params and state as they were.
A round that was open when the process died goes on with its cohort: the fleet says so (`Fleet.reopened`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import numpy as np

from coordinator.fleets.fleet import Fleet, Model, Reopened, Terms
from coordinator.json_values import finite
from coordinator.rounds import intake, plan
from coordinator.rounds.events import Emit
from coordinator.rounds.gathering import Gathered, gather, trained
from coordinator.rounds.plan import RunPlan, Task
from strategies.lazy import NotFinite, checked, in_memory
from strategies.params import Params, Tensors
from strategies.state import State
from strategies.update import Aggregate

MODEL_NOT_FINITE = "model_not_finite"
"""The event of a round whose updates, finite each, come to a model that is not; they count as rejected for it."""

MOST_NAMED = 5
"""Clients that such an event names, those with the largest updates."""


@dataclass(frozen=True)
class Score:
    """The global model on held-out rows, None where there are none. `clients`: accuracy per client that has some."""

    loss: float | None
    accuracy: float | None
    clients: Mapping[str, float]


@dataclass(frozen=True)
class RoundRecord:
    """One line of the report. `seconds` is the whole round, evaluation and commit included.

    `silent` clients were asked and never answered, or answered when the round was over; `rejections` counts
    results by reason, `gathering.OUTLIER` and `MODEL_NOT_FINITE` among them. Accuracies of single clients are given as minimum, median and maximum. What was not tested is None.
    """

    round: int
    selected: int
    accepted: int
    rejected: int
    silent: int
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    client_accuracy_min: float | None
    client_accuracy_median: float | None
    client_accuracy_max: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    rejections: Mapping[str, int]


@dataclass(frozen=True)
class RunState:
    """Where a run is: after `round`, with these params and this strategy state."""

    round: int
    params: Tensors
    strategy: State


class Commit(Protocol):
    """Makes a finished round durable; the record's `seconds` is what has passed so far."""

    def __call__(
        self, state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]
    ) -> None: ...


Evaluate = Callable[[int, Tensors], Score]
"""Scores the params as of a round, given its number."""

Keep = Callable[[RunState], RunState]
"""Computes what a round came to, once, and keeps it: the same state with its arrays in memory or on disk."""


def keep_in_memory(state: RunState) -> RunState:
    strategy = State(in_memory(state.strategy.arrays), state.strategy.values)
    return RunState(state.round, in_memory(state.params), strategy)


def run(
    run_plan: RunPlan,
    fleet: Fleet,
    start: RunState,
    *,
    evaluate: Evaluate,
    commit: Commit,
    finished: Callable[[RoundRecord], None],
    emit: Emit,
    monotonic: Callable[[], float],
    keep: Keep = keep_in_memory,
) -> RunState:
    """Runs the rounds after `start.round` up to the plan's last. `finished` hears of each committed round.

    Updates that lie on disk are folded as `keep` reads the result, so with one that writes to disk no model is
    ever in memory.

    Raises:
        Stopped: the fleet was told to; rounds committed so far stay so, the open one is left as it is.
    """
    state = start
    while state.round < run_plan.rounds:
        began = monotonic()
        state, record, accepted = one_round(run_plan, fleet, state, evaluate, emit, keep)
        commit(state, replace(record, seconds=monotonic() - began), fleet.client_state(accepted))
        finished(replace(record, seconds=monotonic() - began))
    return state


def tell_committed(emit: Emit, row: Mapping[str, Any]) -> None:
    """The event of a committed round, from its line of the report."""
    emit("round_committed", **{key: row[key] for key in ("round", "test_accuracy", "seconds")})


def one_round(
    run_plan: RunPlan,
    fleet: Fleet,
    state: RunState,
    evaluate: Evaluate,
    emit: Emit,
    keep: Keep = keep_in_memory,
) -> tuple[RunState, RoundRecord, tuple[str, ...]]:
    """The next round, not yet committed, and the clients whose updates went in."""
    number = state.round + 1
    model = fleet.model(state.params, run_plan.strategy.broadcast(state.strategy))
    asked = fleet.reopened(number) or _asked(run_plan, fleet, number, model, emit)
    fleet.submit(asked.tasks, model, _terms(run_plan, model, asked))

    gathered = gather(run_plan, fleet, asked, model, emit)

    state, gathered = _moved(run_plan, state, gathered, asked.population, emit, keep)
    score = evaluate(number, state.params)
    record = _record(number, asked.tasks, model, gathered, score)
    return state, record, gathered.accepted


def _asked(run_plan: RunPlan, fleet: Fleet, number: int, model: Model, emit: Emit) -> Reopened:
    """A new round's tasks: a cohort of those that can take part."""
    population = fleet.clients(plan.cohort_size(run_plan))
    cohort = plan.choose_cohort(population, run_plan, plan.generator(run_plan.seed, "cohort", number))
    emit("round_started", round=number, cohort=list(cohort), base=model.base)
    limit = plan.weight_limit(fleet.declared(cohort).values(), run_plan.weight_cap)
    return Reopened(plan.tasks_for(cohort, number, model.base, run_plan), len(population), limit)


def _terms(run_plan: RunPlan, model: Model, asked: Reopened) -> Terms:
    trainable = trained(run_plan, model.params)
    return Terms(
        expected=intake.expected_of(trainable, model.streams, run_plan.max_examples, asked.weight_limit),
        wanted=run_plan.clients_per_round,
        deadline_seconds=run_plan.deadline_seconds,
        population=asked.population,
    )


def _moved(
    run_plan: RunPlan, state: RunState, gathered: Gathered, population: int, emit: Emit, keep: Keep
) -> tuple[RunState, Gathered]:
    """The state after the round, and what was gathered, of which nothing is accepted where the round moves nothing."""
    number, accepted = state.round + 1, len(gathered.accepted)
    if gathered.aggregate is None or accepted < run_plan.min_updates:
        emit("quorum_missed", round=number, accepted=accepted, min_updates=run_plan.min_updates)
        return replace(state, round=number), replace(gathered, accepted=())
    try:
        return _applied(run_plan, state, gathered.aggregate, population, keep), gathered
    except NotFinite as error:
        largest = dict(list(gathered.norms.items())[:MOST_NAMED])
        emit(MODEL_NOT_FINITE, round=number, tensor=error.name, largest_norms=largest)
        rejections = dict(sorted({**gathered.rejections, MODEL_NOT_FINITE: accepted}.items()))
        return replace(state, round=number), replace(gathered, accepted=(), rejections=rejections)


def _applied(
    run_plan: RunPlan, state: RunState, aggregate: Aggregate, population: int, keep: Keep
) -> RunState:
    """The state after the round, kept.

    Raises:
        NotFinite: a trained tensor or the strategy's state would hold NaN or infinity; nothing was kept.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked for
        params, strategy = run_plan.strategy.apply(state.params, state.strategy, aggregate, population)
        after = State(checked(strategy.arrays, strategy.arrays), strategy.values)
        return keep(RunState(state.round + 1, checked(params, run_plan.trainable), after))


def _record(
    number: int, tasks: Sequence[Task], model: Model, gathered: Gathered, score: Score
) -> RoundRecord:
    spread = score.clients.values()
    low, middle, high = (min(spread), median(spread), max(spread)) if spread else (score.accuracy,) * 3
    return RoundRecord(
        round=number,
        selected=len(tasks),
        accepted=len(gathered.accepted),
        rejected=sum(gathered.rejections.values()),
        silent=gathered.silent,
        train_loss=gathered.aggregate.train_loss if gathered.aggregate else None,
        test_loss=score.loss,
        test_accuracy=score.accuracy,
        client_accuracy_min=low,
        client_accuracy_median=middle,
        client_accuracy_max=high,
        bytes_up=gathered.bytes_up,
        bytes_down=len(tasks) * model.payload_bytes,
        seconds=0.0,
        rejections=gathered.rejections,
    )


def as_row(record: RoundRecord) -> dict[str, Any]:
    """The record as JSON values; what is not a finite number, such as the loss of a diverged model, is None."""
    return {name: finite(value) for name, value in vars(record).items()}
