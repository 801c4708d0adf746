"""The simulated fleet: clients are rows of one data set, trained in worker processes, in virtual time.

Answers are yielded in the order in which clients would answer, whichever worker finishes first. A round trains the first of
them that it needs, and more only where some of those were rejected: it never trains clients that it would not have waited for,
and the result does not depend on the number of workers (`coordinator.fleets.simulated_jobs`).

Each local step of a client takes `seconds_per_step` of virtual time, times a factor that is constant over the run:
exp(spread · z), z standard normal. Nothing waits; the numbers only decide the order of answers and the deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.fleets.simulated_jobs import Arrival, RoundJobs
from coordinator.rounds import intake
from coordinator.rounds.fleet import (
    Answer,
    BlockSum,
    Model,
    OpenRound,
    Silence,
    Terms,
)
from coordinator.rounds.plan import Task, entropy, generator
from coordinator.workers.block import RoundTerms
from coordinator.workers.pool import PoolJob, WorkerPool
from edge_client.train import schedule, seeding
from edge_client.wire import arrays
from strategies.params import Params, Tensors, flatten
from strategies.strategy import BLOCK


@dataclass(frozen=True)
class VirtualTime:
    """Speed factors of all clients. `dropout`: probability that a client does not answer in a round."""

    seconds_per_step: float
    factors: dict[str, float]
    dropout: float
    seed: int

    def duration_seconds(self, client: str, steps: int) -> float:
        return steps * self.seconds_per_step * self.factors[client]

    def find_dropouts(self, clients: Sequence[str], round_number: int) -> set[str]:
        """Which of these clients do not answer in a round; each is drawn by a generator of its own."""
        if not self.dropout:
            return set()
        states = seeding.states([entropy(self.seed, f"dropout {client}", round_number) for client in clients])
        draws = zip(clients, states, strict=True)
        return {client for client, state in draws if state.first_random() < self.dropout}


def virtual_time(
    clients: Sequence[str], seed: int, *, seconds_per_step: float, spread: float, dropout: float
) -> VirtualTime:
    """Speed factors drawn by `seed`; with `spread` 0 all clients are equally fast."""
    factors = np.exp(spread * generator(seed, "speed").standard_normal(len(clients)))
    return VirtualTime(seconds_per_step, dict(zip(clients, factors.tolist(), strict=True)), dropout, seed)


@dataclass(frozen=True)
class SimulatedClient:
    """One client. `index`: position of its examples in the partition."""

    name: str
    index: int
    num_examples: int
    runtime: str
    fault: str | None = None


class SimulatedFleet:
    """A fleet over a worker pool that has data and model open (see `coordinator.runs.simulation`).

    `clients_per_job`: how many clients a worker trains at a time, in whole blocks; only if the aggregator takes sums of them.
    """

    is_virtual = True

    def __init__(
        self,
        pool: WorkerPool,
        clients: Sequence[SimulatedClient],
        clock: VirtualTime,
        clients_per_job: int = BLOCK,
    ) -> None:
        self._pool = pool
        self._clients = {client.name: client for client in clients}
        self._clock = clock
        self._clients_per_job = clients_per_job
        self._arrivals: list[Arrival] = []
        self._silent: list[Task] = []
        self._terms: Terms | None = None
        self._client_states: dict[str, dict[str, Params]] = {}
        self._renewed: dict[str, dict[str, Params]] = {}

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return None  # an open round dies with the process; the next process draws the same round again

    def clients(self, wanted: int) -> Sequence[str]:
        return list(self._clients)

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return {name: self._clients[name].num_examples for name in clients}

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        published = self._pool.publish(params)
        extra = sum(value.nbytes for tensors in streams.values() for value in tensors.values())
        return Model(params, streams, published.sha256, published.size_bytes + extra)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        if tasks:
            shared = RoundTerms(tasks[0].message, terms.expected, terms.summation)
            self._pool.publish(model.params)
            self._pool.broadcast(
                {"kind": "round", "terms": shared.to_json()}, [arrays.encode(flatten(model.streams))]
            )
        self._terms = terms
        self._renewed = {}
        cohort = [task.message.client for task in tasks]
        silent = self._clock.find_dropouts(cohort, tasks[0].message.round) if tasks else set()
        self._silent = [task for task in tasks if task.message.client in silent]
        self._arrivals = sorted(
            (self._arrival(task) for task in tasks if task.message.client not in silent),
            key=lambda each: (each.seconds, each.task.position),
        )

    def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence | BlockSum]:
        assert self._terms is not None  # submitted
        closing = self._terms.closing
        accepted = 0
        waiting = [each for each in self._arrivals if not closing.is_past(each.seconds)]
        work = RoundJobs(self._terms, self._clients_per_job, excluded)
        # Only as many clients are trained as the round still needs; further ones where some were rejected.
        while waiting and not closing.is_complete(accepted):
            needed = closing.wanted - accepted
            wave, waiting = waiting[:needed], waiting[needed:]
            for result in self._train(work, wave, waiting):
                accepted += isinstance(result, Answer) and not isinstance(result.verdict, intake.Rejection)
                yield result
        yield from work.release()
        if closing.is_complete(accepted):
            return
        for arrival in self._arrivals:
            if closing.is_past(arrival.seconds):
                yield Silence(arrival.task, "not done by the deadline", closing.deadline_seconds)
        for task in self._silent:
            yield Silence(task, "dropped out", closing.deadline_seconds)

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
                answers |= outcome.answers
                self._renewed |= outcome.states
                yield from work.release(open_blocks)
                while turn < len(wave) and wave[turn].position in answers:
                    yield from answers[wave[turn].position]
                    turn += 1
            jobs = work.retry(self._client_states)

    def _arrival(self, task: Task) -> Arrival:
        client, work = self._clients[task.message.client], task.message
        steps = schedule.count(client.num_examples, work.batch_size, epochs=work.epochs, steps=work.steps)
        seconds = self._clock.duration_seconds(client.name, steps)
        return Arrival(task, seconds, client.index, client.runtime, client.fault)
