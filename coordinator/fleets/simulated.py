"""The simulated fleet: clients are rows of one data set, trained in worker processes, in virtual time.

Answers are yielded in the order in which clients would answer, whichever worker finishes first. A round trains the first of
them that it needs, and more only where some of those were rejected: it never trains clients that it would not have waited for,
and the result does not depend on the number of workers (`coordinator.fleets.simulated_jobs`).

When a client answers, `coordinator.fleets.simulated_clients` says. A cohort is chosen from the clients that are there; if nobody is,
the round begins when the first one arrives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from coordinator.fleets.simulated_clients import TOO_LATE, Outlook, SimulatedClient, VirtualTime, Work
from coordinator.fleets.simulated_jobs import Arrival, RoundJobs
from coordinator.fleets.stragglers import Stragglers
from coordinator.rounds import intake
from coordinator.rounds.fleet import (
    Answer,
    BlockSum,
    Model,
    OpenRound,
    Silence,
    Terms,
)
from coordinator.rounds.plan import Task
from coordinator.rounds.records import Expected
from coordinator.workers.block import RoundTerms
from coordinator.workers.pool import PoolJob, WorkerPool
from edge_client.train import schedule
from edge_client.wire import arrays
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
        self._arrivals: list[Arrival] = []
        self._silent: list[tuple[Task, Outlook]] = []
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
            if each.device_class is not None and each.device_class.is_narrower
        }
        return Model(params, streams, published.sha256, published.size_bytes + extra, narrower)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        if tasks:
            shared = RoundTerms(
                tasks[0].message, terms.expected, terms.summation, self._expected_by_class(tasks, terms)
            )
            self._pool.publish(model.params)
            self._pool.broadcast(
                {"kind": "round", "terms": shared.to_json()}, [arrays.encode(flatten(model.streams))]
            )
        self._terms = terms
        self._renewed = {}
        outlooks = list(zip(tasks, self._foresee(tasks, model, terms), strict=True))
        if (stragglers := self._clock.stragglers) is not None:
            outlooks = _slow_down(outlooks, stragglers, terms.closing.deadline_seconds)
        self._silent = [(task, each) for task, each in outlooks if each.silence is not None]
        answering = [(task, each) for task, each in outlooks if each.silence is None]
        answering.sort(key=lambda it: (it[1].seconds, it[1].order, it[0].position))
        self._arrivals = [self._arrival(task, each.seconds) for task, each in answering]

    def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence | BlockSum]:
        assert self._terms is not None  # submitted
        closing = self._terms.closing
        accepted, self._lasted = 0, 0.0
        waiting = list(self._arrivals)
        work = RoundJobs(self._terms, self._clients_per_job, excluded)
        # Only as many clients are trained as the round still needs; further ones where some were rejected.
        while waiting and not closing.is_complete(accepted):
            needed = closing.wanted - accepted
            wave, waiting = waiting[:needed], waiting[needed:]
            for result in self._train(work, wave, waiting):
                if isinstance(result, Answer):
                    accepted += not isinstance(result.verdict, intake.Rejection)
                    self._lasted = max(self._lasted, result.seconds)
                yield result
        yield from work.release()
        if closing.is_complete(accepted):
            return
        for task, outlook in self._silent:
            self._lasted = max(self._lasted, outlook.seconds)
            yield Silence(task, outlook.silence or "", outlook.seconds)

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
        self, work: RoundJobs, wave: Sequence[Arrival], waiting: Sequence[Arrival]
    ) -> Iterator[Answer | BlockSum]:
        """Answers of this wave in the order of arrival, and sums of blocks that nobody who waits can join."""
        open_blocks = {each.block for each in waiting}
        answers: dict[int, Sequence[Answer]] = {}
        turn = 0
        jobs: Iterable[PoolJob] = work.begin_wave(wave, self._client_states)
        while jobs:
            for job, reply in self._pool.run(jobs):
                outcome = work.read(job, reply)
                answers |= self._judge(outcome.answers)
                self._renewed |= outcome.states
                yield from work.release(open_blocks)
                while turn < len(wave) and wave[turn].position in answers:
                    yield from answers[wave[turn].position]
                    turn += 1
            jobs = work.retry(self._client_states)

    def _judge(self, answers: Mapping[int, Sequence[Answer]]) -> Mapping[int, Sequence[Answer]]:
        """The answers that count, given those of a job by position."""
        return answers

    def _arrival(self, task: Task, seconds: float) -> Arrival:
        client = self._clients[task.message.client]
        device_class = client.device_class.name if client.device_class is not None else None
        return Arrival(task, seconds, client.index, client.runtime, client.fault, device_class)

    def _expected_by_class(self, tasks: Sequence[Task], terms: Terms) -> dict[str, Expected]:
        """What updates of each device class of the round must contain."""
        classes = (self._clients[task.message.client].device_class for task in tasks)
        return {each.name: intake.narrow(terms.expected, each.shapes) for each in classes if each is not None}

    def _foresee(self, tasks: Sequence[Task], model: Model, terms: Terms) -> list[Outlook]:
        if not tasks:
            return []
        clients = [self._clients[task.message.client] for task in tasks]
        whole = intake.content_bytes(terms.expected)
        uploads = {
            name: intake.content_bytes(each) for name, each in self._expected_by_class(tasks, terms).items()
        }
        works = [
            Work(
                _count_steps(client, task),
                model.download_bytes(client.name),
                whole if client.device_class is None else uploads[client.device_class.name],
            )
            for client, task in zip(clients, tasks, strict=True)
        ]
        return self._clock.foresee(clients, works, tasks[0].message.round, self._began_at, terms.closing)


def _slow_down(
    outlooks: Sequence[tuple[Task, Outlook]], stragglers: Stragglers, deadline_seconds: float
) -> list[tuple[Task, Outlook]]:
    """The tasks of a round with the stragglers' partial work, for which they take as long as others for all of it."""
    slowed = stragglers.slow_down([task for task, _ in outlooks])
    return [
        (slowed.get(task.position, task), outlook)
        if outlook.silence is not None or task.position not in slowed or not stragglers.drops
        else (task, Outlook(deadline_seconds, TOO_LATE))
        for task, outlook in outlooks
    ]


def _count_steps(client: SimulatedClient, task: Task) -> int:
    """Local steps of all passes of a client."""
    work = task.message
    passes = [(work.epochs, work.steps)]
    for epochs in personalisation.from_options(work.rule).earlier_epochs:
        passes.append(passes[0] if epochs is None else (epochs, None))
    counted = (
        schedule.count(client.num_examples, work.batch_size, epochs=epochs, steps=steps)
        for epochs, steps in passes
    )
    return sum(counted)
