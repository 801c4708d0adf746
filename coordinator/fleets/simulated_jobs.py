"""How a simulated round is cut into jobs for workers, and what their replies mean.

A wave is a number of clients that train side by side: as many as the round still needs. If the aggregator takes partial sums, a
job holds whole canonical blocks, and its reply one sum for each. A later wave, which replaces rejected clients, trains the
earlier clients of its blocks again, because their sums have become incomplete. If the aggregator needs every update, a job holds one client. With
relays jobs are as without them, though each update is handed over.

Which clients train together follows from the cohort and from virtual time, not from the number of workers.

A job that is given up, because it has ended `pool.ATTEMPTS` workers, is taken apart: each of its clients trains alone, and a client
that ends its workers again is rejected. The others then train together without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.rounds import intake
from coordinator.rounds.fleet import Answer, BlockSum, Terms
from coordinator.rounds.plan import Task
from coordinator.workers import block
from coordinator.workers.pool import ATTEMPTS, DIED, PoolJob, WorkerDied
from edge_client.processes.channel import Frame
from edge_client.wire import arrays
from strategies.params import Params, flatten, unflatten
from strategies.strategy import BLOCK
from strategies.summation_tree import PartialSum


@dataclass(frozen=True)
class Arrival:
    """A client that answers, and when. `part`: index of its examples in the partition. `device_class`: its name, if there are any."""

    task: Task
    seconds: float
    part: int
    runtime: str
    fault: str | None
    device_class: str | None = None

    @property
    def position(self) -> int:
        return self.task.position

    @property
    def block(self) -> int:
        return self.task.position // BLOCK


@dataclass(frozen=True)
class _Member:
    """A client of a job, and the wave in which it trained first."""

    wave: int
    arrival: Arrival


@dataclass(frozen=True)
class _Together:
    """Clients that train in one job. `is_trial`: only to see whether it ends. `tried`: each was tried alone, and none crashed."""

    members: Sequence[_Member]
    is_trial: bool = False
    tried: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a job's reply says: answers by position, and new states by client."""

    answers: Mapping[int, Sequence[Answer]]
    states: Mapping[str, dict[str, Params]]


class RoundJobs:
    """The jobs of one pass over a round, wave by wave."""

    def __init__(self, terms: Terms, clients_per_job: int, excluded: Collection[int]) -> None:
        self._terms = terms
        self._clients_per_job = clients_per_job
        self._excluded = excluded
        self._wave = 0
        self._blocks: dict[int, list[_Member]] = {}
        self._crashed: set[int] = set()
        self._given_up: list[_Together] = []
        self._taken_apart: list[_Together] = []
        self._sums: dict[int, PartialSum] = {}

    def begin_wave(
        self, arrivals: Sequence[Arrival], states: Mapping[str, Mapping[str, Params]]
    ) -> Iterator[PoolJob]:
        """Jobs that train these clients. `states`: what clients have kept, by name."""
        self._wave += 1
        if self._terms.summation is None and not self._terms.in_blocks:
            return (self._job(_Together([_Member(self._wave, each)]), states) for each in arrivals)
        for each in arrivals:
            self._blocks.setdefault(each.block, []).append(_Member(self._wave, each))
            self._sums.pop(each.block, None)  # of an earlier wave
        blocks = [
            sorted(self._alive(self._blocks[number]), key=lambda member: member.arrival.position)
            for number in sorted({each.block for each in arrivals})
        ]
        return (self._job(_Together(each), states) for each in _split(blocks, self._clients_per_job))

    def retry(self, states: Mapping[str, Mapping[str, Params]]) -> Sequence[PoolJob]:
        """The jobs that follow from those given up: first each client alone, then those together that did not crash.

        Raises:
            WorkerDied: clients end their workers together, though none does alone.
        """
        if self._given_up:
            if any(each.tried for each in self._given_up):
                names = ", ".join(each.arrival.task.message.client for each in self._given_up[0].members)
                raise WorkerDied(f"{names} end their worker when they train together, though none does alone")
            self._taken_apart, self._given_up = self._given_up, []
            alone = [[each] for together in self._taken_apart for each in together.members]
            return [self._job(_Together(each, is_trial=True), states) for each in alone]
        left = [self._alive(together.members) for together in self._taken_apart]
        self._taken_apart = []
        return [self._job(_Together(each, tried=True), states) for each in left if each]

    def read(self, job: PoolJob, reply: Frame) -> Outcome:
        """The outcome of a job. Sums are kept until `release`."""
        together: _Together = job.key
        members = together.members
        if DIED in reply.values:
            return self._give_up(together, reply.values[DIED])
        if together.is_trial:
            return Outcome({}, {})
        blobs = list(reply.blobs)
        arrivals = {each.arrival.position: each.arrival for each in members}
        states: dict[str, dict[str, Params]] = {each.task.message.client: {} for each in arrivals.values()}
        for position in reply.values["states"]:
            states[arrivals[position].task.message.client] = unflatten(arrays.decode(blobs.pop(0)))
        for number, *figures in reply.values.get("sums", ()):
            self._sums[number] = block.parse_sum(figures, blobs.pop(0), self._terms.expected)
        answers: dict[int, list[Answer]] = {}
        for position, payload_bytes, *figures in reply.values["answers"]:
            arrival = arrivals[position]
            if self._terms.summation is None and block.is_accepted(figures):
                verdict: Any = block.parse_update(figures, blobs.pop(0))
            else:
                verdict = block.parse_figures(arrival.task.message.client, figures)
            answer = Answer(arrival.task, verdict, payload_bytes, arrival.seconds)
            answers.setdefault(position, []).append(answer)
        return Outcome(answers, states)

    def release(self, open_blocks: Collection[int] = ()) -> Iterator[BlockSum]:
        """The sums that are known, except those of blocks that further clients may join."""
        for number in sorted(self._sums.keys() - set(open_blocks)):
            yield BlockSum(number, self._sums.pop(number))

    def _alive(self, members: Sequence[_Member]) -> list[_Member]:
        return [each for each in members if each.arrival.position not in self._crashed]

    def _give_up(self, together: _Together, how: str) -> Outcome:
        if len(together.members) > 1:
            self._given_up.append(together)
            return Outcome({}, {})
        (arrival,) = [member.arrival for member in together.members]
        self._crashed.add(arrival.position)
        verdict = intake.reject_crashed(arrival.task, ATTEMPTS, how)
        return Outcome({arrival.position: [Answer(arrival.task, verdict, 0, arrival.seconds)]}, {})

    def _job(self, together: _Together, states: Mapping[str, Mapping[str, Params]]) -> PoolJob:
        arrivals = [member.arrival for member in together.members]
        kept = {
            each.position: states[each.task.message.client]
            for each in arrivals
            if states.get(each.task.message.client)
        }
        values = {
            "kind": "train",
            "positions": [each.position for each in arrivals],
            "clients": [each.task.message.client for each in arrivals],
            "seeds": [each.task.message.seed for each in arrivals],
            "epochs": [each.task.message.epochs for each in arrivals],
            "steps": [each.task.message.steps for each in arrivals],
            "parts": [each.part for each in arrivals],
            "runtimes": [each.runtime for each in arrivals],
            "classes": [each.device_class for each in arrivals],
            "waves": [member.wave for member in together.members],
            "faults": {each.position: each.fault for each in arrivals if each.fault is not None},
            "left_out": [each.position for each in arrivals if each.position in self._excluded]
            if self._terms.summation is not None
            else [],
            "states": list(kept),
        }
        blobs = tuple(arrays.encode(flatten(state)) for state in kept.values())
        return PoolJob(together, values, blobs, may_die=True)


def _split(blocks: Sequence[Sequence[_Member]], clients_per_job: int) -> Iterator[list[_Member]]:
    """Whole blocks as jobs of about equal size, few enough that a full one has `clients_per_job` clients or a little more."""
    clients = sum(map(len, blocks))
    jobs = min(len(blocks), -(-clients // clients_per_job))
    for index in range(jobs):
        part = blocks[index * len(blocks) // jobs : (index + 1) * len(blocks) // jobs]
        yield [member for members in part for member in members]
