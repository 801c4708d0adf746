"""The round engine: one federated training as a sequence of committed rounds.

It knows no transport and no framework. A fleet carries tasks and results, a strategy computes, an evaluator scores, a
commit makes the round durable; the engine calls them in this order:

    1. choose a cohort                    4. apply the aggregate to the params
    2. submit its tasks                   5. evaluate
    3. aggregate the accepted updates,    6. commit
       until quorum or deadline
       (`rounds.aggregation`)

In an asynchronous run `rounds.asynchronous` takes the place of steps 1 to 3.

If too few updates arrive, or the new params are not finite, the round leaves params and state unchanged. A round that was
open when the process died continues with its cohort (`Fleet.find_open_round`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any, Protocol

import numpy as np

from coordinator.rounds import downlink, intake, plan
from coordinator.rounds.aggregation import aggregate_round, select_trained
from coordinator.rounds.closing import Closing
from coordinator.rounds.events import Emit
from coordinator.rounds.fleet import Fleet, Model, OpenRound, Terms
from coordinator.rounds.gathered import Aggregated, Gathered
from coordinator.rounds.plan import RunPlan
from coordinator.rounds.private_round import Release
from coordinator.rounds.records import NOBODY, InFlight, RoundRecord, RunState, Score
from coordinator.rounds.trace import RoundTrace
from coordinator.storage.blobs import Blobs
from edge_client.wire.arrays import FilePayload, StoredArrays
from strategies import summation
from strategies.params import NotFinite, Params, State, Tensors, guard_finite, materialize
from strategies.relays import without_relays
from strategies.update import Aggregate

MODEL_NOT_FINITE = "model_not_finite"
"""The event of a round whose updates, each finite, give a model that is not; they all count as rejected."""

BUDGET_SPENT = "privacy_budget_spent"
"""The event of a run that ends because its next round would overspend the privacy budget; the model stays as it is."""

MAX_NAMED_CLIENTS = 5
"""Clients that such an event names, those with the largest updates."""


class CommitStore(Protocol):
    """Makes the rounds of a run durable."""

    def materialize(self, state: RunState) -> RunState:
        """Computes the lazy arrays of a new state once; returns the same state with its arrays in memory or on disk."""

    def commit(
        self, state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]
    ) -> None:
        """Makes a finished round durable; the record's `seconds` is the time until the commit."""

    def on_committed(self, record: RoundRecord) -> None:
        """Called after each commit, with the final record."""


Evaluate = Callable[[int, Tensors], Score]
"""Scores the params after a round, given its number."""


Gather = Callable[[RunState], Gathered]
"""Gathers the updates of the round after this state."""


def materialize_in_memory(state: RunState) -> RunState:
    strategy = State(materialize(state.strategy.arrays), state.strategy.values)
    return RunState(state.round, materialize(state.params), strategy)


def materialize_in(blobs: Blobs, state: RunState) -> RunState:
    """The same state, computed while it is written to `blobs`; its arrays are then read from there.

    The commit stores the same arrays again, which costs nothing (`Blobs.put_arrays`). Either both params and state are
    stored or neither.
    """
    values = state.strategy.values
    infos = blobs.put_all([(state.strategy.arrays, values), (state.params, None)])
    strategy, params = (StoredArrays(FilePayload(blobs.path(info.sha256))) for info in infos)
    return RunState(state.round, params, State(strategy, values))


def run(
    run_plan: RunPlan,
    fleet: Fleet,
    start: RunState,
    store: CommitStore,
    *,
    evaluate: Evaluate,
    emit: Emit,
    monotonic: Callable[[], float],
) -> RunState:
    """Runs the rounds after `start.round` up to the plan's last, or until no better round came for `early_stop` rounds.

    If updates are on disk and the store materializes on disk, no model is ever in memory.

    Raises:
        Stopped: the fleet was stopped; committed rounds stay committed, the open one stays open.
    """
    gather = partial(_gather_cohort, run_plan, fleet, emit)
    return run_gathered(run_plan, gather, start, store, evaluate=evaluate, emit=emit, monotonic=monotonic)


def run_gathered(
    run_plan: RunPlan,
    gather: Gather,
    start: RunState,
    store: CommitStore,
    *,
    evaluate: Evaluate,
    emit: Emit,
    monotonic: Callable[[], float],
) -> RunState:
    """As `run`, whatever way the updates of a round are gathered."""
    state = start
    while not is_over(run_plan, state):
        began = monotonic()
        state, record, client_states = _run_round(run_plan, gather, state, store, evaluate, emit)
        store.commit(state, replace(record, seconds=monotonic() - began), client_states)
        store.on_committed(replace(record, seconds=monotonic() - began))
    if (privacy := run_plan.privacy) is not None and state.round < run_plan.rounds:
        emit(
            BUDGET_SPENT, round=state.round, epsilon=privacy.epsilon_after(state.round), budget=privacy.budget
        )
    return state


def is_over(run_plan: RunPlan, state: RunState) -> bool:
    """Whether no round follows `state`."""
    stalled = 0 < run_plan.early_stop <= state.best.waited
    return stalled or state.round >= run_plan.rounds or is_spent(run_plan, state)


def is_spent(run_plan: RunPlan, state: RunState) -> bool:
    """Whether another round would overspend the run's privacy budget."""
    privacy = run_plan.privacy
    return privacy is not None and not privacy.affords(state.round + 1)


def emit_committed(emit: Emit, row: Mapping[str, Any]) -> None:
    """Emits the event of a committed round, given its line of the report."""
    emit("round_committed", **{key: row[key] for key in ("round", "test_accuracy", "seconds")})


def _run_round(
    run_plan: RunPlan, gather: Gather, state: RunState, store: CommitStore, evaluate: Evaluate, emit: Emit
) -> tuple[RunState, RoundRecord, Mapping[str, Mapping[str, Params]]]:
    """The state after the next round, not yet committed, its record, and the new states of clients."""
    number, best = state.round + 1, state.best
    if run_plan.privacy is not None:
        run_plan.privacy.begin(number)
    released = None if run_plan.privacy is None else run_plan.privacy.find_release(number)
    # A round whose noise is drawn releases that, whoever is there by now.
    gathered, before = gather(state) if released is None else released.gathered(), state
    state, aggregated = _update_model(run_plan, state, gathered, released, store, emit)
    score = evaluate(number, state.params)
    compared = score.compared(run_plan.by_metric)
    best = best.after(number, compared, state.params if run_plan.keep_best else None)
    record = _make_record(number, replace(gathered, aggregated=aggregated), score)
    if (privacy := run_plan.privacy) is not None:
        if not privacy.is_central:
            record = replace(record, train_loss=None)  # clients tell none
        record = replace(
            record, epsilon=privacy.epsilon_after(number), clip_norm=privacy.clip_norm(before.strategy)
        )
    if run_plan.code is not None:
        tensors = intake.tensor_bytes(intake.make_expected(select_trained(run_plan, state.params), {}))
        record = replace(record, bytes_up_uncompressed=aggregated.answers * tensors)
    state = replace(state, best=best, in_flight=gathered.in_flight, held=gathered.held)
    return state, record, gathered.client_states(aggregated.accepted)


def _gather_cohort(run_plan: RunPlan, fleet: Fleet, emit: Emit, state: RunState) -> Gathered:
    """The answers of a cohort whose clients all start from the model of `state`."""
    number = state.round + 1
    if (privacy := run_plan.privacy) is not None:
        run_plan = replace(run_plan, strategy=privacy.limit(run_plan.strategy, state.strategy))
    held = downlink.next_held(run_plan, state)
    sent = state.params if held is None else held.params
    strategy = run_plan.strategy
    model = fleet.model(sent, strategy.broadcast(state.strategy))
    model = replace(model, class_models=strategy.models(state.strategy))
    opened = fleet.find_open_round(number) or _start_round(run_plan, fleet, number, model, emit)
    model = downlink.measure_downloads(model, held, (task.message.client for task in opened.tasks))
    if privacy is not None:
        privacy.enter(number, [task.message.client for task in opened.tasks])
    fleet.submit(opened.tasks, model, make_terms(run_plan, model, opened))
    trace = RoundTrace() if run_plan.records else None
    aggregated = aggregate_round(run_plan, fleet, opened, model, emit, trace)
    if trace is not None:
        trace.emit(emit, number, opened.population, opened.tasks)
    seconds = fleet.simulated_seconds()
    return Gathered(
        len(opened.tasks),
        model.total_download_bytes(opened.tasks) + aggregated.received_bytes,
        opened.population,
        aggregated,
        fleet.client_state,
        simulated_seconds=seconds,
        in_flight=NOBODY if seconds is None else InFlight(state.in_flight.seconds + seconds),
        bytes_down_uncompressed=None
        if held is None
        else len(opened.tasks) * model.payload_bytes + aggregated.received_bytes,
        held=downlink.deliver(held, number, aggregated.accepted),
    )


def _start_round(run_plan: RunPlan, fleet: Fleet, number: int, model: Model, emit: Emit) -> OpenRound:
    """The tasks of a new round: its cohort is drawn from the clients that can take part."""
    cohort, population = _choose_cohort(run_plan, fleet, number)
    emit("round_started", round=number, cohort=list(cohort), base=model.base)
    limit = plan.weight_limit(fleet.declared_examples(cohort).values(), run_plan.weight_cap)
    return OpenRound(plan.make_tasks(cohort, number, model.base, run_plan), population, limit)


def _choose_cohort(run_plan: RunPlan, fleet: Fleet, number: int) -> tuple[tuple[str, ...], int]:
    """The clients of a round, and how many could have been chosen."""
    if (recorded := run_plan.cohorts.get(number)) is not None:
        return recorded.clients, recorded.population
    privacy = run_plan.privacy
    is_drawn = privacy is not None and privacy.sampling == "poisson"
    population = fleet.clients(privacy.clients if privacy and is_drawn else plan.cohort_size(run_plan))
    if privacy is not None:
        population = privacy.admit(number, population)
        if is_drawn:
            return privacy.choose(number, population), len(population)
    if len(population) <= plan.cohort_size(run_plan):
        return tuple(population), len(population)
    rng = plan.generator(run_plan.seed, "cohort", number)
    return plan.choose_cohort(population, run_plan, rng), len(population)


def make_terms(run_plan: RunPlan, model: Model, opened: OpenRound) -> Terms:
    trained = select_trained(run_plan, model.params)
    return Terms(
        expected=intake.make_expected(
            trained,
            run_plan.strategy.client_rule.answer(model.streams),
            run_plan.max_examples,
            opened.weight_limit,
            code=run_plan.code,
        ),
        closing=_closing(run_plan, opened),
        population=opened.population,
        summation=summation.of(run_plan.strategy),
        # As without relays, so that the updates are the same.
        in_blocks=summation.of(without_relays(run_plan.strategy)) is not None,
    )


def _closing(run_plan: RunPlan, opened: OpenRound) -> Closing:
    """When the round closes. Under Poisson sampling it waits for everybody who was drawn."""
    if run_plan.privacy is None or not run_plan.privacy.is_central:
        return run_plan.closing
    return replace(run_plan.closing, wanted=max(1, len(opened.tasks)))


def _update_model(
    run_plan: RunPlan,
    state: RunState,
    gathered: Gathered,
    released: Release | None,
    store: CommitStore,
    emit: Emit,
) -> tuple[RunState, Aggregated]:
    """The state after the round, and the aggregated results; none is accepted if the model stays unchanged. `released`: by an earlier
    process."""
    aggregated = gathered.aggregated
    number, accepted = state.round + 1, len(aggregated.accepted)
    aggregate, privacy = aggregated.aggregate, run_plan.privacy
    if privacy is not None:
        trained = select_trained(run_plan, state.params)
        released = released or privacy.release(number, gathered, state.strategy, trained)
        aggregate = released.aggregate
    least = max(run_plan.min_updates, run_plan.strategy.aggregator.fewest_updates)
    hides_cohort = privacy is not None and privacy.is_central
    if aggregate is None or (accepted < least and not hides_cohort):
        if accepted < least:
            emit("quorum_missed", round=number, accepted=accepted, min_updates=least)
        return replace(state, round=number), replace(aggregated, accepted=())
    try:
        return _apply(run_plan, state, aggregate, gathered.population, released, store), aggregated
    except NotFinite as error:
        largest = dict(list(aggregated.norms.items())[:MAX_NAMED_CLIENTS])
        emit(MODEL_NOT_FINITE, round=number, tensor=error.name, largest_norms=largest)
        rejections = dict(sorted({**aggregated.rejections, MODEL_NOT_FINITE: accepted}.items()))
        return replace(state, round=number), replace(aggregated, accepted=(), rejections=rejections)


def _apply(
    run_plan: RunPlan,
    state: RunState,
    aggregate: Aggregate,
    population: int,
    released: Release | None,
    store: CommitStore,
) -> RunState:
    """The materialized state after the round. `released`: under differential privacy.

    Raises:
        NotFinite: a trained tensor or the strategy's state would hold NaN or infinity; nothing was stored.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # `guard_finite` catches the results
        params, strategy = run_plan.strategy.apply(state.params, state.strategy, aggregate, population)
        after = State(guard_finite(strategy.arrays, strategy.arrays), strategy.values)
        if run_plan.privacy is not None and released is not None:
            after = run_plan.privacy.keep(after, released.clip_norm)
        return store.materialize(RunState(state.round + 1, guard_finite(params, run_plan.trainable), after))


def _make_record(number: int, gathered: Gathered, score: Score) -> RoundRecord:
    spread, aggregated = score.clients.values(), gathered.aggregated
    low, middle, high = (min(spread), median(spread), max(spread)) if spread else (None,) * 3
    return RoundRecord(
        round=number,
        selected=gathered.selected,
        accepted=len(aggregated.accepted),
        rejected=sum(aggregated.rejections.values()),
        silent=aggregated.silent,
        train_loss=aggregated.aggregate.train_loss if aggregated.aggregate else None,
        test_loss=score.loss,
        test_accuracy=score.accuracy,
        client_accuracy_min=low,
        client_accuracy_median=middle,
        client_accuracy_max=high,
        bytes_up=aggregated.bytes_up,
        bytes_down=gathered.bytes_down,
        seconds=0.0,
        rejections=aggregated.rejections,
        test_metric=score.metric,
        simulated_seconds=gathered.simulated_seconds,
        staleness_mean=fmean(gathered.staleness) if gathered.staleness else None,
        staleness_max=max(gathered.staleness, default=None),
        bytes_down_uncompressed=gathered.bytes_down_uncompressed,
    )
