"""Asynchronous rounds: the server steps at every K accepted updates, and no client waits for another one.

A round is one step of the server. A client that becomes free is followed by another one, which starts from the newest
model, so the updates of a round come from models of different rounds (FedBuff: Nguyen 2022, Algorithm 1):

    1. begin: the fleet keeps `concurrency` clients at work
    2. gather K accepted updates, whichever round their clients started in
    3. discount each by its staleness, then average them. A strategy that mixes models (FedAsync: Xie 2019, Algorithm 1) first measures
       each from the newest model

Steps 4 to 6 are those of a synchronous round (`rounds.engine`). A task carries the number of the round in which it started.
Its staleness is the number of rounds since then. A client trains from each model once at most; otherwise the rows of a fast
client would count twice from the same start. So a round always ends, if nothing can come any more with fewer than K updates.

Updates are averaged in the order in which their clients started: by round, then by position. The result depends on which
updates a round takes, not on the order of their arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from coordinator.rounds import engine, plan
from coordinator.rounds.aggregation import (
    OUTLIER,
    Bounds,
    find_outliers,
    measure,
    select_trained,
)
from coordinator.rounds.engine import CommitStore, Evaluate
from coordinator.rounds.events import Emit
from coordinator.rounds.fleet import Answer, Model, OpenRound
from coordinator.rounds.gathered import Aggregated, Gathered
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import RunPlan, Task
from coordinator.rounds.records import RunState
from coordinator.rounds.step import AsynchronousFleet, Step, asynchrony_of, staleness_of
from coordinator.rounds.trace import RoundTrace
from strategies.params import Tensors, l2_norm
from strategies.staleness import discount, rebase
from strategies.summation import clamp
from strategies.update import Update


def run(
    run_plan: RunPlan,
    fleet: AsynchronousFleet,
    start: RunState,
    store: CommitStore,
    *,
    evaluate: Evaluate,
    emit: Emit,
    monotonic: Callable[[], float],
) -> RunState:
    """As `engine.run`, for an asynchronous run."""
    gather = partial(_gather_buffer, run_plan, fleet, emit)
    return engine.run_gathered(
        run_plan, gather, start, store, evaluate=evaluate, emit=emit, monotonic=monotonic
    )


def _gather_buffer(run_plan: RunPlan, fleet: AsynchronousFleet, emit: Emit, state: RunState) -> Gathered:
    """The updates that close the round after `state`."""
    number, asynchrony = state.round + 1, asynchrony_of(run_plan)
    model = fleet.model(state.params, {})
    opened = fleet.find_open_round(number) or _open(run_plan, fleet, number, model, emit)
    oldest = 1 if asynchrony.max_staleness is None else number - asynchrony.max_staleness
    fleet.begin(Step(number, model, engine.make_terms(run_plan, model, opened), oldest, run_plan))
    trace = RoundTrace()
    buffer = _fill(fleet, number, emit, trace)
    if run_plan.records:
        trace.emit(emit, number, opened.population)
    aggregated, staleness = _aggregate(run_plan, opened, model.params, fleet.base, number, buffer, emit)
    started = fleet.started()
    return Gathered(
        started,
        started * model.payload_bytes,
        opened.population,
        aggregated,
        lambda accepted: {},
        staleness,
        fleet.simulated_seconds(),
        fleet.in_flight(),
    )


def _open(run_plan: RunPlan, fleet: AsynchronousFleet, number: int, model: Model, emit: Emit) -> OpenRound:
    """A new round. Its weight limit follows from what a sample of the clients declared, as many as train at a time."""
    population = fleet.clients(run_plan.min_updates)
    emit("round_started", round=number, cohort=[], base=model.base)
    rng = plan.generator(run_plan.seed, "weights", number)
    size = min(asynchrony_of(run_plan).concurrency, len(population))
    sample = [population[index] for index in rng.choice(len(population), size=size, replace=False)]
    limit = plan.weight_limit(fleet.declared_examples(sample).values(), run_plan.weight_cap)
    return OpenRound((), len(population), limit)


@dataclass(frozen=True)
class _Buffer:
    """The answers of a round."""

    updates: Sequence[tuple[Task, Update]]
    rejections: Counter[str]
    silent: int
    answers: int
    bytes_up: int


def _fill(fleet: AsynchronousFleet, number: int, emit: Emit, trace: RoundTrace) -> _Buffer:
    updates: list[tuple[Task, Update]] = []
    rejections: Counter[str] = Counter()
    silent = answers = bytes_up = 0
    for result in fleet.results():
        trace.add(result)
        where = {"round": number, "client": result.task.message.client}
        if not isinstance(result, Answer):
            silent += 1
            emit("client_silent", **where, reason=result.reason)
            continue
        answers += 1
        bytes_up += result.payload_bytes
        if isinstance(result.verdict, Rejection):
            rejections[result.verdict.reason] += 1
            emit("update_rejected", **where, reason=result.verdict.reason, words=result.verdict.message)
            continue
        stale = staleness_of(number, result.task)
        emit("update_accepted", **where, seconds=result.seconds, staleness=stale)
        assert isinstance(result.verdict, Update), "fleets of asynchronous runs sum nothing"
        updates.append((result.task, result.verdict))
    updates.sort(key=lambda each: (each[0].message.round, each[0].position))
    return _Buffer(updates, rejections, silent, answers, bytes_up)


def _aggregate(
    run_plan: RunPlan,
    opened: OpenRound,
    newest: Tensors,
    base: Callable[[Task], Tensors],
    number: int,
    buffer: _Buffer,
    emit: Emit,
) -> tuple[Aggregated, Sequence[int]]:
    """The aggregate of the buffer, and the staleness of each update in it. `newest`: params. `base`: returns those that a client
    started from."""
    strategy = run_plan.strategy
    bounds = Bounds(
        factor=run_plan.outlier_factor,
        params_norm=cache(lambda: l2_norm(select_trained(run_plan, newest))),
        rule=strategy.client_rule,
        lr=run_plan.local.lr,
    )
    norms = {at: measure(task.message.client, update) for at, (task, update) in enumerate(buffer.updates)}
    outliers = find_outliers(norms, bounds)
    fold = strategy.start(len(buffer.updates))
    accepted: list[str] = []
    staleness: list[int] = []
    for at, (task, update) in enumerate(buffer.updates):
        where = {"round": number, "client": task.message.client}
        if (outlier := outliers.get(at)) is not None:
            emit("update_excluded", **where, reason=OUTLIER, **outlier.figures())
            continue
        bounded = clamp(update, opened.weight_limit)
        if bounded.num_examples < update.num_examples:
            emit("weight_capped", **where, examples=update.num_examples, counted=bounded.num_examples)
        stale = staleness_of(number, task)
        weight = asynchrony_of(run_plan).staleness.weight(stale)
        changed = strategy.transform(bounded)
        if strategy.mixes_models and stale:
            changed = rebase(changed, base(task), newest)
        fold.add(at, discount(changed, weight))
        accepted.append(task.message.client)
        staleness.append(stale)
    rejections = {**buffer.rejections, **({OUTLIER: len(outliers)} if outliers else {})}
    kept = sorted((each.norm, each.client) for at, each in norms.items() if at not in outliers)
    return Aggregated(
        aggregate=fold.finish() if accepted else None,
        accepted=tuple(accepted),
        rejections=dict(sorted(rejections.items())),
        silent=buffer.silent,
        answers=buffer.answers,
        bytes_up=buffer.bytes_up,
        norms={client: norm for norm, client in reversed(kept)},
    ), staleness
