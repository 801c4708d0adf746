"""The simulated fleet: clients are rows of one data set, trained in worker processes, in virtual time.

Tasks run in the order in which their clients would answer, and answers are yielded in that order, whichever worker finishes
first. So a round that closes at its quorum never trains clients that it would not have waited for, and the result does not
depend on the number of workers.

Each local step of a client takes `seconds_per_step` of virtual time, times a factor that is constant over the run:
exp(spread · z), z standard normal. Nothing waits; the numbers only decide the order of answers and the deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.rounds import intake
from coordinator.rounds.fleet import (
    Answer,
    Model,
    OpenRound,
    Silence,
    Terms,
    encode_model,
)
from coordinator.rounds.plan import Task, generator
from coordinator.workers.pool import Job, WorkerPool
from edge_client.train import schedule
from edge_client.wire import arrays
from edge_client.wire.arrays import BytesPayload
from strategies.params import Params, Tensors, flatten, unflatten
from strategies.update import Update


@dataclass(frozen=True)
class VirtualTime:
    """Speed factors of all clients. `dropout`: probability that a client does not answer in a round."""

    seconds_per_step: float
    factors: dict[str, float]
    dropout: float
    seed: int

    def duration_seconds(self, client: str, steps: int) -> float:
        return steps * self.seconds_per_step * self.factors[client]

    def drops_out(self, client: str, round_number: int) -> bool:
        return bool(generator(self.seed, f"dropout {client}", round_number).random() < self.dropout)


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


@dataclass(frozen=True)
class _Arrival:
    task: Task
    client: SimulatedClient
    seconds: float


class SimulatedFleet:
    """A fleet over a worker pool that has data and model open (see `coordinator.runs.simulation`)."""

    is_virtual = True

    def __init__(self, pool: WorkerPool, clients: Sequence[SimulatedClient], clock: VirtualTime) -> None:
        self._pool = pool
        self._clients = {client.name: client for client in clients}
        self._clock = clock
        self._arrivals: list[_Arrival] = []
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
        return encode_model(params, streams)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        blobs = [arrays.encode(model.params), arrays.encode(flatten(model.streams))]
        self._pool.broadcast({"kind": "model"}, blobs)
        self._terms = terms
        self._renewed = {}
        answering = [t for t in tasks if not self._clock.drops_out(t.message.client, t.message.round)]
        self._silent = [task for task in tasks if task not in answering]
        self._arrivals = sorted(
            map(self._arrival, answering), key=lambda each: (each.seconds, each.task.position)
        )

    def results(self) -> Iterator[Answer | Silence]:
        assert self._terms is not None  # submitted
        closing = self._terms.closing
        accepted: set[str] = set()
        for arrival, payload in self._uploads(
            [each for each in self._arrivals if not closing.is_past(each.seconds)]
        ):
            answer = self._check(arrival, payload, accepted)
            if isinstance(answer.verdict, Update):
                accepted.add(arrival.client.name)
            yield answer
            if closing.is_complete(len(accepted)):
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

    def _uploads(self, in_time: Sequence[_Arrival]) -> Iterator[tuple[_Arrival, bytes]]:
        """Uploads of these arrivals in their order; clients are trained on demand."""
        done: dict[int, tuple[bytes, ...]] = {}
        turn = 0
        for job, reply in self._pool.run(self._job(index, arrival) for index, arrival in enumerate(in_time)):
            *payloads, state = reply.blobs
            done[job.key] = tuple(payloads)
            self._renewed[in_time[job.key].client.name] = unflatten(arrays.decode(state))
            while turn in done:
                for payload in done.pop(turn):
                    yield in_time[turn], payload
                turn += 1

    def _check(self, arrival: _Arrival, payload: bytes, accepted: Collection[str]) -> Answer:
        assert self._terms is not None
        verdict = intake.check(BytesPayload(payload), arrival.task, self._terms.expected)
        if isinstance(verdict, Update) and arrival.client.name in accepted:
            verdict = intake.reject_duplicate(arrival.task)
        return Answer(arrival.task, verdict, len(payload), arrival.seconds)

    def _arrival(self, task: Task) -> _Arrival:
        client = self._clients[task.message.client]
        work = task.message
        steps = schedule.count(client.num_examples, work.batch_size, epochs=work.epochs, steps=work.steps)
        return _Arrival(task, client, self._clock.duration_seconds(client.name, steps))

    def _job(self, key: int, arrival: _Arrival) -> Job:
        client = arrival.client
        values = {
            "kind": "train",
            "task": arrival.task.message.to_json(),
            "part": client.index,
            "runtime": client.runtime,
            "fault": client.fault,
        }
        return Job(key, values, (arrays.encode(flatten(self._client_states.get(client.name, {}))),))
