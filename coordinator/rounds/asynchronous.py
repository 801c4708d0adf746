"""Asynchronous rounds: the server steps at every K accepted updates, and no client waits for another one.

A round is one step of the server. A client that becomes free is followed by another one, which starts from the newest
model, so the updates of a round come from models of different rounds (FedBuff: Nguyen 2022, Algorithm 1):

    1. begin: the fleet keeps `concurrency` clients at work
    2. gather K accepted updates, whichever round their clients started in
    3. discount each by its staleness, then average them

Steps 4 to 6 are those of a synchronous round (`rounds.engine`). A task carries the number of the round in which it started.
Its staleness is the number of rounds since then. A client trains from each model once at most; otherwise the rows of a fast
client would count twice from the same start. So a round always ends, if nothing can come any more with fewer than K updates.

Updates are averaged in the order in which their clients started: by round, then by position. The result depends on which
updates a round takes, not on the order of their arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Protocol

from coordinator.rounds import engine, plan
from coordinator.rounds.aggregation import (
    OUTLIER,
    Aggregated,
    Bounds,
    clamp,
    find_outliers,
    measure,
    select_trained,
)
from coordinator.rounds.engine import CommitStore, Evaluate, Gathered
from coordinator.rounds.events import Emit
from coordinator.rounds.fleet import Answer, Model, OpenRound, Silence, Terms
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import Asynchrony, RunPlan, Task
from coordinator.rounds.records import InFlight, RunState
from strategies.params import Tensors, l2_norm
from strategies.staleness import discount
from strategies.update import Update


@dataclass(frozen=True)
class Step:
    """One round of an asynchronous run, as its fleet needs it.

    Attributes:
        terms: when it closes; its deadline is that of each single client, from its start.
        oldest: first round whose clients may still be accepted.
    """

    number: int
    model: Model
    terms: Terms
    oldest: int
    run_plan: RunPlan

    @property
    def concurrency(self) -> int:
        return asynchrony_of(self.run_plan).concurrency

    def task(self, client: str, position: int) -> Task:
        """The task of a client that starts now; `position` is its own in this round."""
        return make_task(self.run_plan, self.number, self.model.base, client, position)

    def draw(self, clients: Sequence[str], busy: Collection[str], started: int) -> int | None:
        """Index of the client to start next, None if all are busy. `started`: how many were started in this round.

        Each client that is not busy is equally likely. `busy` holds no client twice, and only such as are in `clients`.
        """
        if len(busy) >= len(clients):
            return None
        rng = plan.generator(self.run_plan.seed, "start", self.number, started)
        while clients[index := int(rng.integers(len(clients)))] in busy:
            pass
        return index


class AsynchronousFleet(Protocol):
    """Carries tasks to clients that do not wait for each other. Every method may raise `Stopped`."""

    def find_open_round(self, round_number: int) -> OpenRound | None:
        """This round if it was begun but not committed, without its tasks."""

    def clients(self, wanted: int) -> Sequence[str]:
        """As `Fleet.clients`."""

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        """As `Fleet.declared_examples`."""

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        """Prepares params for the clients that start from now on; those of clients at work stay available."""

    def begin(self, step: Step) -> None:
        """Begins a round, or continues it if it was open before.

        Clients that started before `step.oldest` are told to stop; each counts as rejected, as `stale_base`.
        """

    def results(self) -> Iterator[Answer | Silence]:
        """Answers in the order of their arrival, with as many accepted updates as close the round, or fewer if no client is
        at work any more and none can start. Clients keep starting meanwhile."""

    def started(self) -> int:
        """Number of clients that have started in this round so far."""

    def in_flight(self) -> InFlight:
        """The clients at work, for the checkpoint. Empty for fleets that store them themselves."""

    def simulated_seconds(self) -> float | None:
        """Virtual time that the round took; None in real time."""


def asynchrony_of(run_plan: RunPlan) -> Asynchrony:
    """How an asynchronous run works."""
    assert run_plan.asynchrony is not None
    return run_plan.asynchrony


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


def make_task(run_plan: RunPlan, number: int, base: str, client: str, position: int) -> Task:
    """The task of a client that starts in round `number`; `position` is its own in this round."""
    (task,) = plan.make_tasks((client,), number, base, run_plan)
    return replace(task, position=position)


def staleness_of(number: int, task: Task) -> int:
    """The staleness of a client's answer in round `number`."""
    return number - task.message.round


def _gather_buffer(run_plan: RunPlan, fleet: AsynchronousFleet, emit: Emit, state: RunState) -> Gathered:
    """The updates that close the round after `state`."""
    number, asynchrony = state.round + 1, asynchrony_of(run_plan)
    model = fleet.model(state.params, {})
    opened = fleet.find_open_round(number) or _open(run_plan, fleet, number, model, emit)
    oldest = 1 if asynchrony.max_staleness is None else number - asynchrony.max_staleness
    fleet.begin(Step(number, model, engine.make_terms(run_plan, model, opened), oldest, run_plan))
    buffer = _fill(fleet, number, emit)
    aggregated, staleness = _aggregate(run_plan, opened, model, number, buffer, emit)
    return Gathered(
        model,
        fleet.started(),
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
    bytes_up: int


def _fill(fleet: AsynchronousFleet, number: int, emit: Emit) -> _Buffer:
    updates: list[tuple[Task, Update]] = []
    rejections: Counter[str] = Counter()
    silent = bytes_up = 0
    for result in fleet.results():
        where = {"round": number, "client": result.task.message.client}
        if not isinstance(result, Answer):
            silent += 1
            emit("client_silent", **where, reason=result.reason)
            continue
        bytes_up += result.payload_bytes
        if isinstance(result.verdict, Rejection):
            rejections[result.verdict.reason] += 1
            emit("update_rejected", **where, reason=result.verdict.reason, words=result.verdict.message)
            continue
        stale = staleness_of(number, result.task)
        emit("update_accepted", **where, seconds=result.seconds, staleness=stale)
        updates.append((result.task, result.verdict))
    updates.sort(key=lambda each: (each[0].message.round, each[0].position))
    return _Buffer(updates, rejections, silent, bytes_up)


def _aggregate(
    run_plan: RunPlan, opened: OpenRound, model: Model, number: int, buffer: _Buffer, emit: Emit
) -> tuple[Aggregated, Sequence[int]]:
    """The aggregate of the buffer, and the staleness of each update in it."""
    bounds = Bounds(
        factor=run_plan.outlier_factor,
        params_norm=cache(lambda: l2_norm(select_trained(run_plan, model.params))),
        rule=run_plan.strategy.client_rule,
        lr=run_plan.local.lr,
    )
    norms = {at: measure(task.message.client, update) for at, (task, update) in enumerate(buffer.updates)}
    outliers = find_outliers(norms, bounds)
    fold = run_plan.strategy.start(len(buffer.updates))
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
        fold.add(at, discount(run_plan.strategy.transform(bounded), weight))
        accepted.append(task.message.client)
        staleness.append(stale)
    rejections = {**buffer.rejections, **({OUTLIER: len(outliers)} if outliers else {})}
    kept = sorted((each.norm, each.client) for at, each in norms.items() if at not in outliers)
    return Aggregated(
        aggregate=fold.finish() if accepted else None,
        accepted=tuple(accepted),
        rejections=dict(sorted(rejections.items())),
        silent=buffer.silent,
        bytes_up=buffer.bytes_up,
        norms={client: norm for norm, client in reversed(kept)},
    ), staleness
