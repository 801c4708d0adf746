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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coordinator.rounds import intake
from coordinator.rounds.fleet import Answer, BlockSum, Terms
from coordinator.rounds.plan import Tasks
from coordinator.workers import block, replies
from coordinator.workers.pool import ATTEMPTS, DIED, PoolJob, WorkerDied
from edge_client.processes.channel import Frame
from edge_client.wire import arrays
from strategies.params import Params, flatten, unflatten
from strategies.strategy import BLOCK


@dataclass(frozen=True)
class Cohort:
    """The clients of a round by position, by column.

    Attributes:
        seconds: when each answers, if it does.
        parts: index of its examples in the partition.
        faults: of the faulty ones.
        classes: the name of its device class, if there are any.
    """

    tasks: Tasks
    seconds: Sequence[float]
    parts: Sequence[int]
    runtimes: Sequence[str]
    faults: Mapping[int, str]
    classes: Sequence[str | None]

    @cached_property
    def is_alike(self) -> bool:
        """Whether all clients do the same work in the same runtime."""
        return not self.tasks.changed and len({*self.runtimes}) == len({*self.classes}) == 1


@dataclass(frozen=True)
class _Together:
    """Positions of clients that train in one job.

    `is_whole`: nobody can join their blocks later. `is_trial`: only to see whether it ends. `tried`: each was tried alone, and none
    crashed.
    """

    positions: Sequence[int]
    is_whole: bool = False
    is_trial: bool = False
    tried: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a job's reply says.

    Attributes:
        answers: by position, singly.
        accepted: by position, of further answers the figures (`replies.parse_accepted`).
        states: new states by client.
    """

    answers: Mapping[int, Sequence[Answer]]
    accepted: Mapping[int, Sequence[float]]
    states: Mapping[str, dict[str, Params]]


NOTHING = Outcome({}, {}, {})


class RoundJobs:
    """The jobs of one pass over a round, wave by wave."""

    def __init__(self, cohort: Cohort, terms: Terms, clients_per_job: int, excluded: Collection[int]) -> None:
        self._cohort = cohort
        self._terms = terms
        self._clients_per_job = clients_per_job
        self._excluded = excluded
        self._wave = 0
        self._waves: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}
        self._crashed: set[int] = set()
        self._given_up: list[_Together] = []
        self._taken_apart: list[_Together] = []
        self._sums: dict[int, BlockSum] = {}

    def begin_wave(
        self, positions: Sequence[int], states: Mapping[str, Mapping[str, Params]], is_last: bool
    ) -> Iterator[PoolJob]:
        """Jobs that train these clients. `states`: what clients have kept, by name. `is_last`: no wave can follow."""
        self._wave += 1
        self._waves |= dict.fromkeys(positions, self._wave)
        if self._terms.summation is None and not self._terms.in_blocks:
            return (self._job(_Together([each]), states) for each in positions)
        numbers = sorted({each // BLOCK for each in positions})
        for number in numbers:
            self._sums.pop(number, None)  # of an earlier wave
        for each in positions:
            self._blocks.setdefault(each // BLOCK, []).append(each)
        blocks = [sorted(self._alive(self._blocks[number])) for number in numbers]
        is_whole = is_last and self._wave == 1
        return (
            self._job(_Together(each, is_whole), states) for each in _split(blocks, self._clients_per_job)
        )

    def retry(self, states: Mapping[str, Mapping[str, Params]]) -> Sequence[PoolJob]:
        """The jobs that follow from those given up: first each client alone, then those together that did not crash.

        Raises:
            WorkerDied: clients end their workers together, though none does alone.
        """
        if self._given_up:
            if any(each.tried for each in self._given_up):
                clients = self._cohort.tasks.clients
                names = ", ".join(clients[each] for each in self._given_up[0].positions)
                raise WorkerDied(f"{names} end their worker when they train together, though none does alone")
            self._taken_apart, self._given_up = self._given_up, []
            alone = [[each] for together in self._taken_apart for each in together.positions]
            return [self._job(_Together(each, is_trial=True), states) for each in alone]
        left = [
            _Together(self._alive(each.positions), each.is_whole, tried=True) for each in self._taken_apart
        ]
        self._taken_apart = []
        return [self._job(each, states) for each in left if each.positions]

    def read(self, job: PoolJob, reply: Frame) -> Outcome:
        """The outcome of a job. Sums are kept until `release`."""
        together: _Together = job.key
        if DIED in reply.values:
            return self._give_up(together, reply.values[DIED])
        if together.is_trial:
            return NOTHING
        tasks, seconds = self._cohort.tasks, self._cohort.seconds
        blobs = iter(reply.blobs)
        accepted = {int(line[0]): line for line in replies.parse_accepted(next(blobs)).tolist()}
        states: dict[str, dict[str, Params]] = {tasks.clients[each]: {} for each in together.positions}
        for position in reply.values["states"]:
            states[tasks.clients[position]] = unflatten(arrays.decode(next(blobs)))
        answers: dict[int, list[Answer]] = {}
        for position, payload_bytes, *figures in reply.values["answers"]:
            if self._terms.summation is None and replies.is_accepted(figures):
                verdict: Any = replies.parse_update(figures, next(blobs))
            else:
                verdict = replies.parse_figures(tasks.clients[position], figures)
            answer = Answer(tasks[position], verdict, payload_bytes, seconds[position])
            answers.setdefault(position, []).append(answer)
        sums: Iterable[bytes | memoryview] = reply.mapped or blobs
        for described, content in zip(reply.values["sums"], sums, strict=True):
            found = replies.parse_sum(described, content, self._terms.expected)
            self._sums[found.block] = found
        return Outcome(answers, accepted, states)

    def release(self, open_blocks: Collection[int] = ()) -> Iterator[BlockSum]:
        """The sums that are known, except those of blocks that further clients may join."""
        for number in sorted(self._sums.keys() - set(open_blocks)):
            yield self._sums.pop(number)

    def _alive(self, positions: Sequence[int]) -> list[int]:
        return [each for each in positions if each not in self._crashed]

    def _give_up(self, together: _Together, how: str) -> Outcome:
        if len(together.positions) > 1:
            self._given_up.append(together)
            return NOTHING
        (position,) = together.positions
        self._crashed.add(position)
        task = self._cohort.tasks[position]
        verdict = intake.reject_crashed(task, ATTEMPTS, how)
        return Outcome({position: [Answer(task, verdict, 0, self._cohort.seconds[position])]}, {}, {})

    def _job(self, together: _Together, states: Mapping[str, Mapping[str, Params]]) -> PoolJob:
        cohort, positions = self._cohort, together.positions
        tasks = cohort.tasks
        clients = [tasks.clients[each] for each in positions]
        kept = {
            position: states[client]
            for position, client in zip(positions, clients, strict=True)
            if states and states.get(client)
        }
        kinds: dict[block.Kind, int] = {}
        alike = positions[:1] if cohort.is_alike and self._wave == 1 else positions
        kind_of = [kinds.setdefault(self._kind(each), len(kinds)) for each in alike]
        values = {
            "kind": "train",
            "positions": positions,
            "clients": clients,
            "seeds": [tasks.seeds[each] for each in positions],
            "parts": [cohort.parts[each] for each in positions],
            "kinds": list(kinds),
            "kind_of": kind_of if len(kinds) > 1 else None,
            "faults": {each: cohort.faults[each] for each in positions if each in cohort.faults},
            "left_out": [each for each in positions if each in self._excluded]
            if self._terms.summation is not None
            else [],
            "states": list(kept),
            "is_whole": together.is_whole,
        }
        blobs = tuple(arrays.encode(flatten(state)) for state in kept.values())
        return PoolJob(together, values, blobs, may_die=True)

    def _kind(self, position: int) -> block.Kind:
        cohort = self._cohort
        changed = cohort.tasks.changed.get(position)
        work = cohort.tasks.shared if changed is None else changed.message
        runtime, device_class = cohort.runtimes[position], cohort.classes[position]
        return block.Kind(work.epochs, work.steps, runtime, device_class, self._waves[position])


def _split(blocks: Sequence[Sequence[int]], clients_per_job: int) -> Iterator[list[int]]:
    """Whole blocks as jobs of about equal size, few enough that a full one has `clients_per_job` clients or a little more."""
    clients = sum(map(len, blocks))
    jobs = min(len(blocks), -(-clients // clients_per_job))
    for index in range(jobs):
        part = blocks[index * len(blocks) // jobs : (index + 1) * len(blocks) // jobs]
        yield [position for positions in part for position in positions]
