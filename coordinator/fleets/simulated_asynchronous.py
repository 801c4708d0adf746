"""The simulated fleet of an asynchronous run: clients train in worker processes, and virtual time says when they answer.

A client that is free starts from the newest model, and answers after its own time. Virtual time and the order of all starts and
answers follow from the seed and from which updates were accepted, never from how fast workers are. Workers train clients in
the order in which they will answer. They may train ahead: what a client computes is fixed once it has started.

Answers of one moment come before the starts of that moment, so clients that answer together are followed by clients of one
version.

In memory are the versions that clients at work started from, at most as many as clients, the updates that were trained ahead,
at most one for each of these clients, and the updates of the round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from coordinator.fleets.simulated_clients import Outlook, SimulatedClient, VirtualTime, Work
from coordinator.rounds import intake
from coordinator.rounds.fleet import Answer, Model, OpenRound, Silence, encode_model
from coordinator.rounds.plan import RunPlan, Task
from coordinator.rounds.records import InFlight, Training
from coordinator.rounds.step import Step, make_task, staleness_of
from coordinator.workers.pool import PoolJob
from edge_client.processes.channel import Frame
from edge_client.train import schedule
from edge_client.wire import arrays
from edge_client.wire.arrays import BytesPayload
from strategies.params import Tensors
from strategies.update import Update


class Workers(Protocol):
    """What the fleet needs of `coordinator.workers.pool.WorkerPool`."""

    def broadcast(self, values: dict[str, Any], blobs: Sequence[bytes] = (), *, key: str | None) -> None: ...

    def forget(self, key: str) -> None: ...

    def run(self, jobs: Iterator[PoolJob]) -> Iterator[tuple[PoolJob, Frame]]: ...


class AsynchronousSimulatedFleet:
    """Implements `rounds.step.AsynchronousFleet` over a worker pool that has data and model open."""

    def __init__(self, pool: Workers, clients: Sequence[SimulatedClient], clock: VirtualTime) -> None:
        self._names = [client.name for client in clients]
        self._clients = dict(zip(self._names, clients, strict=True))
        self._clock = clock
        self._trainer = Trainer(pool, self._clients)
        self._step: Step | None = None
        self._now = self._began_at = 0.0
        self._starts = 0
        self._at_work: dict[int, Working] = {}
        self._bases: dict[int, Model] = {}
        self._started_here: set[str] = set()

    def resume(self, in_flight: InFlight, run_plan: RunPlan) -> None:
        """Goes on from a checkpoint, with the clients that were at work."""
        self._now, self._starts = in_flight.seconds, in_flight.started
        for number, params in in_flight.bases.items():
            self._bases[number] = encode_model(params, {})
            self._trainer.add_version(number, self._bases[number], in_flight.bases.keys())
        for training in in_flight.clients:
            base, position = self._bases[training.round].base, self._clients[training.client].index
            task = make_task(run_plan, training.round, base, training.client, position)
            self._at_work[training.order] = Working(training, task)

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return None  # an open round dies with the process; the next process plays the same round again

    def clients(self, wanted: int) -> Sequence[str]:
        return self._names

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return {name: self._clients[name].num_examples for name in clients}

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        return encode_model(params, streams)

    def begin(self, step: Step) -> None:
        self._step, self._began_at = step, self._now
        self._started_here = set()
        self._bases[step.number] = step.model
        needed = {each.training.round for each in self._at_work.values()} | {step.number}
        self._bases = {number: model for number, model in self._bases.items() if number in needed}
        self._trainer.add_version(step.number, step.model, needed)

    def results(self) -> Iterator[Answer | Silence]:
        step = self._require_step()
        accepted = 0
        for old in [each for each in self._at_work.values() if each.training.round < step.oldest]:
            del self._at_work[old.training.order]
            stale = intake.reject_stale(old.task, staleness_of(step.number, old.task))
            yield Answer(old.task, stale, 0, 0.0)
        while not step.terms.closing.is_complete(accepted) and (each := self._next_to_end()) is not None:
            seconds = self._now - self._began_at
            if each.training.silence is not None:
                yield Silence(each.task, each.training.silence, seconds)
                continue
            for answer in self._answers(each, seconds):
                accepted += isinstance(answer.verdict, Update)
                yield answer
        self._trainer.finish_queued()

    def base(self, task: Task) -> Tensors:
        return self._bases[task.message.round].params

    def started(self) -> int:
        return len(self._started_here)

    def in_flight(self) -> InFlight:
        clients = tuple(each.training for _, each in sorted(self._at_work.items()))
        bases = {number: self._bases[number].params for number in sorted({each.round for each in clients})}
        return InFlight(self._now, self._starts, clients, bases)

    def simulated_seconds(self) -> float | None:
        return self._now - self._began_at

    def _next_to_end(self) -> Working | None:
        """The next client to answer or to be given up, at whose moment it is then; None if nobody is at work."""
        while True:
            if not any(each.training.ends_at <= self._now for each in self._at_work.values()):
                self._start_clients()
            each = min(self._at_work.values(), key=_by_end, default=None)
            arrives_at = self._next_arrival()
            if arrives_at < (math.inf if each is None else each.training.ends_at):
                self._now = arrives_at
                continue
            if each is not None:
                del self._at_work[each.training.order]
                self._now = max(self._now, each.training.ends_at)
            return each

    def _next_arrival(self) -> float:
        """When a client arrives that would start at once; infinity if there is no place for it, or none is away."""
        present = self._clock.find_present(self._now)
        if present is None or len(self._at_work) >= self._require_step().concurrency:
            return math.inf
        away = ~present
        away[[self._clients[name].index for name in self._busy()]] = False
        return self._clock.next_arrival(self._now, away)

    def _busy(self) -> set[str]:
        """Clients that cannot start: those at work, and those that have trained from the newest model."""
        return {each.training.client for each in self._at_work.values()} | self._started_here

    def _start_clients(self) -> None:
        """Starts clients until as many are at work as may be, or no further one is free and there."""
        step = self._require_step()
        present = self._clock.find_present(self._now)
        names = self._names if present is None else [self._names[at] for at in np.flatnonzero(present)]
        busy = self._busy()
        if present is not None:
            busy = {name for name in busy if present[self._clients[name].index]}
        while len(self._at_work) < step.concurrency:
            index = step.draw(names, busy, len(self._started_here))
            if index is None:
                return
            name = names[index]
            busy.add(name)
            self._started_here.add(name)
            task = step.task(name, self._clients[name].index)
            outlook = self._foresee(task)
            ends_at = self._now + float(outlook.seconds[0])
            training = Training(name, step.number, self._starts, ends_at, outlook.silent.get(0))
            self._at_work[self._starts] = Working(training, task)
            self._starts += 1

    def _foresee(self, task: Task) -> Outlook:
        """What becomes of a task that starts now."""
        step, client = self._require_step(), self._clients[task.message.client]
        work = task.message
        steps = schedule.count(client.num_examples, work.batch_size, epochs=work.epochs, steps=work.steps)
        load = Work(steps, step.model.payload_bytes, intake.content_bytes(step.terms.expected))
        return self._clock.foresee([client], load, work.round, self._now, step.terms.closing)

    def _answers(self, each: Working, seconds: float) -> Iterator[Answer]:
        """The answers to one task: of its uploads at most one is accepted."""
        expected, is_accepted = self._require_step().terms.expected, False
        waiting = sorted(self._at_work.values(), key=_by_end)
        for payload in self._trainer.uploads(each, waiting):
            verdict = intake.check(BytesPayload(payload), each.task, expected)
            if isinstance(verdict, Update) and is_accepted:
                verdict = intake.reject_duplicate(each.task)
            is_accepted |= isinstance(verdict, Update)
            yield Answer(each.task, verdict, len(payload), seconds)

    def _require_step(self) -> Step:
        assert self._step is not None  # begun
        return self._step


@dataclass(frozen=True)
class Working:
    """A client at work, and its task."""

    training: Training
    task: Task


def _by_end(each: Working) -> tuple[float, int]:
    return each.training.ends_at, each.training.order


def _key(number: int) -> str:
    return f"version {number}"


class Trainer:
    """Trains clients in the workers, ahead of their turn."""

    def __init__(self, pool: Workers, clients: Mapping[str, SimulatedClient]) -> None:
        self._pool = pool
        self._clients = clients
        self._waiting: deque[Working] = deque()
        self._sent: set[int] = set()
        self._versions: set[int] = set()
        self._done: dict[int, Sequence[bytes]] = {}
        self._replies: Iterator[tuple[PoolJob, Frame]] = iter(())

    def add_version(self, number: int, model: Model, needed: Collection[int]) -> None:
        """Gives the workers a version; they keep only those that are needed, and so do workers that replace others."""
        for old in self._versions - set(needed):
            self._pool.forget(_key(old))
        self._versions = self._versions & set(needed) | {number}
        values = {"kind": "version", "round": number, "needed": sorted(needed)}
        self._pool.broadcast(values, [arrays.encode(model.params)], key=_key(number))

    def uploads(self, wanted: Working, waiting: Sequence[Working]) -> Sequence[bytes]:
        """What a client uploads. `waiting`: those that will end after it, in that order; they are trained meanwhile."""
        self._waiting = deque(each for each in (wanted, *waiting) if self._is_open(each))
        while wanted.training.order not in self._done:
            if not self._receive():
                self._replies = self._pool.run(self._jobs())
        return self._done.pop(wanted.training.order)

    def finish_queued(self) -> None:
        """Waits for what the workers have been sent, so that other jobs may follow."""
        self._waiting.clear()
        while self._receive():
            pass

    def _is_open(self, each: Working) -> bool:
        order = each.training.order
        return each.training.silence is None and order not in self._done and order not in self._sent

    def _receive(self) -> bool:
        """Whether one more reply came; False if none is outstanding."""
        received = next(self._replies, None)
        if received is None:
            return False
        job, reply = received
        self._sent.discard(job.key)
        self._done[job.key] = tuple(reply.blobs)
        return True

    def _jobs(self) -> Iterator[PoolJob]:
        while self._waiting:
            each = self._waiting.popleft()
            client = self._clients[each.training.client]
            self._sent.add(each.training.order)
            values = {
                "kind": "train_version",
                "task": each.task.message.to_json(),
                "part": client.index,
                "runtime": client.runtime,
                "fault": client.fault,
            }
            yield PoolJob(each.training.order, values)
