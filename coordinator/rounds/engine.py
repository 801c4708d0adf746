"""The round engine: one federated training as a sequence of committed rounds.

It knows no transport and no framework. A fleet carries tasks and results, a strategy computes, an
evaluator scores, a commit makes the round durable; the engine says in which order.

    1. choose a cohort            4. fold the accepted updates, move the params
    2. submit its tasks           5. evaluate
    3. accept or reject results   6. commit
       until quorum or deadline
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from coordinator.fleets.fleet import Delivery, Fleet, Model
from coordinator.rounds import intake, plan
from coordinator.rounds.events import Emit
from coordinator.rounds.plan import RunPlan, Task
from edge_client.wire import arrays
from strategies.params import Params
from strategies.state import State
from strategies.update import Aggregate


@dataclass(frozen=True)
class Score:
    """The global model on held-out rows. `clients`: accuracy per client that has such rows."""

    loss: float
    accuracy: float
    clients: Mapping[str, float]


@dataclass(frozen=True)
class RoundRecord:
    """One line of the report. `seconds` is the whole round, evaluation and commit included.

    `silent` clients were asked and never answered, or answered when the round was over; `rejections` counts
    results by reason. Accuracies of single clients are given as minimum, median and maximum.
    """

    round: int
    selected: int
    accepted: int
    rejected: int
    silent: int
    train_loss: float | None
    test_loss: float
    test_accuracy: float
    client_accuracy_min: float
    client_accuracy_median: float
    client_accuracy_max: float
    bytes_up: int
    bytes_down: int
    seconds: float
    rejections: Mapping[str, int]


@dataclass(frozen=True)
class RunState:
    """Where a run is: after `round`, with these params and this strategy state."""

    round: int
    params: Params
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


def run(
    run_plan: RunPlan,
    fleet: Fleet,
    start: RunState,
    *,
    evaluate: Callable[[Params], Score],
    commit: Commit,
    finished: Callable[[RoundRecord], None],
    emit: Emit,
    monotonic: Callable[[], float],
) -> RunState:
    """Runs the rounds after `start.round` up to the plan's last. `finished` hears of each committed round."""
    state = start
    while state.round < run_plan.rounds:
        began = monotonic()
        state, record, accepted = one_round(run_plan, fleet, state, evaluate, emit)
        commit(state, replace(record, seconds=monotonic() - began), fleet.client_state(accepted))
        record = replace(record, seconds=monotonic() - began)
        finished(record)
        tell_committed(emit, as_row(record))
    return state


def tell_committed(emit: Emit, row: Mapping[str, Any]) -> None:
    """The event of a committed round, from its line of the report."""
    emit("round_committed", **{key: row[key] for key in ("round", "test_accuracy", "seconds")})


def one_round(
    run_plan: RunPlan, fleet: Fleet, state: RunState, evaluate: Callable[[Params], Score], emit: Emit
) -> tuple[RunState, RoundRecord, tuple[str, ...]]:
    """The next round, not yet committed, and the clients whose updates went in."""
    number = state.round + 1
    population = fleet.clients()
    streams = run_plan.strategy.broadcast(state.strategy)
    model = model_of(state.params, streams)
    cohort = plan.choose_cohort(population, run_plan, plan.generator(run_plan.seed, "cohort", number))
    tasks = plan.tasks_for(cohort, number, model.base, run_plan)
    emit("round_started", round=number, cohort=list(cohort), base=model.base)
    fleet.submit(tasks, model)

    gathered = gather(run_plan, fleet, tasks, model, emit)

    params, strategy = state.params, state.strategy
    if gathered.aggregate is not None and len(gathered.accepted) >= run_plan.min_updates:
        params, strategy = run_plan.strategy.apply(params, strategy, gathered.aggregate, len(population))
    else:
        emit("quorum_missed", round=number, accepted=len(gathered.accepted), min_updates=run_plan.min_updates)
        gathered = replace(gathered, accepted=())
    score = evaluate(params)
    record = _record(number, tasks, model, gathered, score)
    return RunState(number, params, strategy), record, gathered.accepted


def model_of(params: Params, streams: Mapping[str, Params]) -> Model:
    """Params ready to be sent, named by their hash."""
    encoded = arrays.encode(params)
    extra = sum(value.nbytes for tensors in streams.values() for value in tensors.values())
    return Model(params, streams, arrays.sha256(encoded), len(encoded) + extra)


def gather(run_plan: RunPlan, fleet: Fleet, tasks: Sequence[Task], model: Model, emit: Emit) -> Gathered:
    """Results folded as they arrive, until enough were accepted, none is outstanding, or the deadline."""
    trainable = {name: model.params[name] for name in run_plan.trainable}
    expected = intake.expected_of(trainable, model.streams)
    fold = run_plan.strategy.start(len(tasks))
    accepted: list[str] = []
    answered: set[int] = set()
    rejections: Counter[str] = Counter()
    bytes_up = 0
    for result in fleet.results(until=run_plan.deadline_seconds):
        client = result.task.message.client
        if not isinstance(result, Delivery):
            emit("client_silent", round=result.task.message.round, client=client, reason=result.reason)
            continue
        answered.add(result.task.position)
        bytes_up += len(result.payload)
        verdict = intake.check(result.payload, result.task, expected, already_accepted=client in accepted)
        if isinstance(verdict, intake.Rejection):
            rejections[verdict.reason] += 1
            emit(
                "update_rejected",
                round=result.task.message.round,
                client=client,
                reason=verdict.reason,
                words=verdict.words,
            )
            continue
        fold.add(result.task.position, run_plan.strategy.transform(verdict))
        accepted.append(client)
        emit("update_accepted", round=result.task.message.round, client=client, seconds=result.seconds)
        if len(accepted) == run_plan.clients_per_round:
            break
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
    spread = sorted(score.clients.values()) or [score.accuracy]
    return RoundRecord(
        round=number,
        selected=len(tasks),
        accepted=len(gathered.accepted),
        rejected=sum(gathered.rejections.values()),
        silent=gathered.silent,
        train_loss=gathered.aggregate.train_loss if gathered.aggregate else None,
        test_loss=score.loss,
        test_accuracy=score.accuracy,
        client_accuracy_min=spread[0],
        client_accuracy_median=_median(spread),
        client_accuracy_max=spread[-1],
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

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: plain(value) for name, value in vars(record).items()}
