"""The round engine: one federated training as a sequence of committed rounds.

It knows no transport and no framework. A fleet carries tasks and results, a strategy computes, an
evaluator scores, a commit makes the round durable; the engine says in which order.

    1. choose a cohort            4. fold the accepted updates, move the params
    2. submit its tasks           5. evaluate
    3. hear what the fleet        6. commit
       accepted and rejected,
       until quorum or deadline

A round that was open when the process died goes on with its cohort: the fleet says so (`Fleet.reopened`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from coordinator.fleets.fleet import Answer, Fleet, Model, Reopened, Terms
from coordinator.json_values import finite
from coordinator.rounds import intake, plan
from coordinator.rounds.events import Emit
from coordinator.rounds.plan import RunPlan, Task
from strategies.lazy import in_memory, picked
from strategies.params import Params, Tensors
from strategies.state import State
from strategies.update import Aggregate


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
    results by reason. Accuracies of single clients are given as minimum, median and maximum. What was not tested is None.
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


@dataclass(frozen=True)
class Gathered:
    """What a cohort's answers came to."""

    aggregate: Aggregate | None
    accepted: tuple[str, ...]
    rejections: Mapping[str, int]
    silent: int
    bytes_up: int


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
    fleet.submit(asked.tasks, model, _terms(run_plan, model, asked.population))

    gathered = gather(run_plan, fleet, asked.tasks, emit)

    state = replace(state, round=number)
    if gathered.aggregate is not None and len(gathered.accepted) >= run_plan.min_updates:
        moved = run_plan.strategy.apply(state.params, state.strategy, gathered.aggregate, asked.population)
        state = keep(RunState(number, *moved))
    else:
        emit("quorum_missed", round=number, accepted=len(gathered.accepted), min_updates=run_plan.min_updates)
        gathered = replace(gathered, accepted=())
    score = evaluate(number, state.params)
    record = _record(number, asked.tasks, model, gathered, score)
    return state, record, gathered.accepted


def _asked(run_plan: RunPlan, fleet: Fleet, number: int, model: Model, emit: Emit) -> Reopened:
    """A new round's tasks: a cohort of those that can take part."""
    population = fleet.clients(plan.cohort_size(run_plan))
    cohort = plan.choose_cohort(population, run_plan, plan.generator(run_plan.seed, "cohort", number))
    emit("round_started", round=number, cohort=list(cohort), base=model.base)
    return Reopened(plan.tasks_for(cohort, number, model.base, run_plan), len(population))


def _terms(run_plan: RunPlan, model: Model, population: int) -> Terms:
    trainable = picked({name: (model.params, name) for name in run_plan.trainable})
    return Terms(
        expected=intake.expected_of(trainable, model.streams, run_plan.max_examples),
        wanted=run_plan.clients_per_round,
        deadline_seconds=run_plan.deadline_seconds,
        population=population,
    )


def gather(run_plan: RunPlan, fleet: Fleet, tasks: Sequence[Task], emit: Emit) -> Gathered:
    """Results folded as they arrive, until the fleet has no more to tell."""
    fold = run_plan.strategy.start(len(tasks))
    accepted: list[str] = []
    answered: set[int] = set()
    rejections: Counter[str] = Counter()
    bytes_up = 0
    for result in fleet.results():
        told = {"round": result.task.message.round, "client": result.task.message.client}
        if not isinstance(result, Answer):
            emit("client_silent", **told, reason=result.reason)
            continue
        answered.add(result.task.position)
        bytes_up += result.payload_bytes
        if isinstance(result.verdict, intake.Rejection):
            rejections[result.verdict.reason] += 1
            emit("update_rejected", **told, reason=result.verdict.reason, words=result.verdict.words)
            continue
        fold.add(result.task.position, run_plan.strategy.transform(result.verdict))
        accepted.append(result.task.message.client)
        emit("update_accepted", **told, seconds=result.seconds)
    fleet.cancel([task for task in tasks if task.position not in answered])
    return Gathered(
        aggregate=fold.finish() if accepted else None,
        accepted=tuple(accepted),
        rejections=dict(sorted(rejections.items())),
        silent=len(tasks) - len(answered),
        bytes_up=bytes_up,
    )


def _record(
    number: int, tasks: Sequence[Task], model: Model, gathered: Gathered, score: Score
) -> RoundRecord:
    spread = sorted(score.clients.values())
    low, middle, high = (spread[0], _median(spread), spread[-1]) if spread else (score.accuracy,) * 3
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


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def as_row(record: RoundRecord) -> dict[str, Any]:
    """The record as JSON values; what is not a finite number, such as the loss of a diverged model, is None."""
    return {name: finite(value) for name, value in vars(record).items()}
