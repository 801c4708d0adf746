"""The simulated fleet: clients are rows of one data set, trained in worker processes, in virtual time.

Answers are yielded in the order in which clients would answer, whichever worker finishes first. A round trains the first of
them that it needs, and more only where some of those were rejected: it never trains clients that it would not have waited for,
and the result does not depend on the number of workers (`coordinator.fleets.simulated_jobs`).

When a client answers, `coordinator.fleets.simulated_clients` says. A cohort is chosen from the clients that are there; if nobody is,
the round begins when the first one arrives.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from coordinator.fleets.simulated_clients import TOO_LATE, Outlook, SimulatedClient, VirtualTime, Work
from coordinator.fleets.simulated_jobs import Cohort, Outcome, RoundJobs
from coordinator.fleets.stragglers import Stragglers
from coordinator.rounds import intake
from coordinator.rounds.fleet import (
    Accepted,
    Answer,
    BlockSum,
    Model,
    OpenRound,
    Result,
    Silence,
    Terms,
)
from coordinator.rounds.plan import Task, Tasks
from coordinator.workers.block import RoundTerms
from coordinator.workers.pool import PoolJob, WorkerPool
from edge_client.relay.expected import Expected
from edge_client.train import schedule
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from strategies import personalisation
from strategies.params import Params, Tensors, flatten
from strategies.strategy import BLOCK


class SimulatedFleet:
    """A fleet over a worker pool that has data and model open (see `coordinator.runs.simulation`).

    `clients_per_job`: how many clients a worker trains at a time, in whole blocks; only if the aggregator takes sums of them.
    `now`: virtual time at which the first round begins.
    """

    def __init__(
        self,
        pool: WorkerPool,
        clients: Sequence[SimulatedClient],
        clock: VirtualTime,
        clients_per_job: int = BLOCK,
        now: float = 0.0,
    ) -> None:
        self._pool = pool
        self._names = [client.name for client in clients]
        self._clients = dict(zip(self._names, clients, strict=True))
        self._clock = clock
        self._opened_at = self._began_at = now
        self._lasted = 0.0
        self._clients_per_job = clients_per_job
        self._cohort: Cohort | None = None
        self._arrivals: list[int] = []
        self._silent: dict[int, str] = {}
        self._terms: Terms | None = None
        self._client_states: dict[str, dict[str, Params]] = {}
        self._renewed: dict[str, dict[str, Params]] = {}

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return None  # an open round dies with the process; the next process draws the same round again

    def clients(self, wanted: int) -> Sequence[str]:
        self._opened_at += self.simulated_seconds()
        self._began_at, self._lasted = self._opened_at, 0.0
        present = self._clock.find_present(self._began_at)
        while present is not None and not present.any():
            self._began_at = self._clock.next_arrival(self._began_at, ~present)
            present = self._clock.find_present(self._began_at)
        return self._names if present is None else [self._names[index] for index in np.flatnonzero(present)]

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return {name: self._clients[name].num_examples for name in clients}

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        published = self._pool.publish(params)
        extra = sum(value.nbytes for tensors in streams.values() for value in tensors.values())
        narrower = {
            name: each.device_class.model_bytes + extra
            for name, each in self._clients.items()
            if each.device_class is not None and each.device_class.has_other_model
        }
        return Model(params, streams, published.sha256, published.size_bytes + extra, narrower)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self._terms = terms
        self._renewed = {}
        self._arrivals, self._silent = [], {}
        if not tasks:
            self._cohort = None
            return
        columns = Tasks.of(tasks)
        clients = [self._clients[name] for name in columns.clients]
        by_class = _expected_by_class(clients, terms)
        shared = RoundTerms(columns.shared, terms.expected, terms.summation, by_class)
        self._pool.publish(model.params)
        self._pool.broadcast(
            {"kind": "round", "terms": shared.to_json()},
            [arrays.encode(flatten(each)) if each else b"" for each in (model.streams, model.class_models)],
        )
        outlook = self._foresee(columns, clients, model, terms)
        if (stragglers := self._clock.stragglers) is not None:
            columns = _slow_down(columns, outlook, stragglers, terms.closing.deadline_seconds)
        order = np.lexsort((outlook.order, outlook.seconds)).tolist()  # stable: then in the cohort's order
        self._silent = dict(sorted(outlook.silent.items()))
        self._arrivals = [each for each in order if each not in outlook.silent]
        self._cohort = Cohort(
            columns,
            outlook.seconds.tolist(),
            [client.index for client in clients],
            [client.runtime for client in clients],
            {at: client.fault for at, client in enumerate(clients) if client.fault is not None},
            [None if client.device_class is None else client.device_class.name for client in clients],
        )

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        assert self._terms is not None  # submitted
        closing = self._terms.closing
        accepted, self._lasted = 0, 0.0
        if self._cohort is None:
            return
        waiting = self._arrivals
        work = RoundJobs(self._cohort, self._terms, self._clients_per_job, excluded)
        # Only as many clients are trained as the round still needs; further ones where some were rejected.
        while waiting and not closing.is_complete(accepted):
            needed = closing.wanted - accepted
            wave, waiting = waiting[:needed], waiting[needed:]
            for result in self._train(self._cohort, work, wave, waiting):
                if isinstance(result, Accepted):
                    accepted += len(result.positions)
                    self._lasted = max(self._lasted, *result.seconds)
                elif isinstance(result, Answer):
                    accepted += not isinstance(result.verdict, intake.Rejection)
                    self._lasted = max(self._lasted, result.seconds)
                yield result
        yield from work.release()
        if closing.is_complete(accepted):
            return
        for position, silence in self._silent.items():
            seconds = self._cohort.seconds[position]
            self._lasted = max(self._lasted, seconds)
            yield Silence(self._cohort.tasks[position], silence, seconds)

    def simulated_seconds(self) -> float:
        return (self._began_at - self._opened_at) + self._lasted

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Does nothing: closing `results` stops the work."""

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        changed = {name: self._renewed[name] for name in accepted if self._renewed.get(name)}
        self._client_states |= changed
        return changed

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        self._client_states = {client: dict(streams) for client, streams in states.items()}

    def _train(
        self, cohort: Cohort, work: RoundJobs, wave: Sequence[int], waiting: Sequence[int]
    ) -> Iterator[Answer | Accepted | BlockSum]:
        """Answers of this wave in the order of arrival, and sums of blocks that nobody who waits can join."""
        open_blocks = {each // BLOCK for each in waiting}
        answers: dict[int, Sequence[Answer]] = {}
        accepted: dict[int, Sequence[float]] = {}
        turn = 0
        jobs: Iterable[PoolJob] = work.begin_wave(wave, self._client_states, is_last=not waiting)
        while jobs:
            for job, reply in self._pool.run(jobs):
                outcome = self._judge(work.read(job, reply))
                answers |= outcome.answers
                accepted |= outcome.accepted
                self._renewed |= outcome.states
                yield from work.release(open_blocks)
                while turn < len(wave):
                    ready = list(itertools.takewhile(accepted.__contains__, wave[turn:]))
                    if ready:
                        yield accept(cohort, ready, [accepted[each] for each in ready])
                        turn += len(ready)
                    elif wave[turn] in answers:
                        yield from answers[wave[turn]]
                        turn += 1
                    else:
                        break
            jobs = work.retry(self._client_states)

    def _judge(self, outcome: Outcome) -> Outcome:
        """The answers that count, given those of a job."""
        return outcome

    def _foresee(
        self, tasks: Tasks, clients: Sequence[SimulatedClient], model: Model, terms: Terms
    ) -> Outlook:
        counts = {
            count: _count_steps(count, tasks.shared) for count in {each.num_examples for each in clients}
        }
        whole = intake.content_bytes(terms.expected)
        uploads = {
            name: intake.content_bytes(each) for name, each in _expected_by_class(clients, terms).items()
        }
        work = Work(
            np.array([counts[client.num_examples] for client in clients]),
            np.array([model.download_bytes(client.name) for client in clients])
            if model.bytes_by_client
            else model.payload_bytes,
            np.array(
                [
                    whole if client.device_class is None else uploads[client.device_class.name]
                    for client in clients
                ]
            )
            if uploads
            else whole,
        )
        return self._clock.foresee(clients, work, tasks.shared.round, self._began_at, terms.closing)


def _expected_by_class(clients: Sequence[SimulatedClient], terms: Terms) -> dict[str, Expected]:
    """What updates of each device class of the round must contain."""
    classes = {each.device_class.name: each.device_class for each in clients if each.device_class is not None}
    return {
        name: intake.narrow(terms.expected, each.shapes)
        if each.model is None
        else intake.of_class(terms.expected, each.trained_shapes)
        for name, each in classes.items()
    }


def accept(cohort: Cohort, positions: list[int], figures: Sequence[Sequence[float]]) -> Accepted:
    """The accepted updates of these clients, given their figures."""
    _, payload_bytes, examples, steps, norms = zip(*figures, strict=True)
    return Accepted(
        cohort.tasks,
        positions,
        [cohort.tasks.clients[each] for each in positions],
        list(map(int, payload_bytes)),
        list(map(int, examples)),
        list(map(int, steps)),
        norms,
        [cohort.seconds[each] for each in positions],
    )


def _slow_down(tasks: Tasks, outlook: Outlook, stragglers: Stragglers, deadline_seconds: float) -> Tasks:
    """The tasks of a round with the stragglers' partial work, for which they take as long as others for all of it; changes `outlook`
    where they are dropped."""
    slowed = stragglers.slow_down(tasks)
    if stragglers.drops:
        for position in slowed.keys() - outlook.silent.keys():
            outlook.silent[position] = TOO_LATE
            outlook.seconds[position] = deadline_seconds
        return tasks
    return replace(tasks, changed={**tasks.changed, **slowed})


def _count_steps(num_examples: int, work: TaskMessage) -> int:
    """Local steps of all passes of a client."""
    passes = [(work.epochs, work.steps)]
    for epochs in personalisation.from_options(work.rule).earlier_epochs:
        passes.append(passes[0] if epochs is None else (epochs, None))
    counted = (
        schedule.count(num_examples, work.batch_size, epochs=epochs, steps=steps) for epochs, steps in passes
    )
    return sum(counted)
