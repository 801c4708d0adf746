"""A job of clients: each is trained and checked where it is, and what counts of their updates is summed there.

The coordinator's process gets figures of each client and one sum for each canonical block, or, for an aggregator that needs
every update, the updates themselves. The rules are those of a real fleet: `intake` checks an update, or the bytes that a faulty
client uploads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from coordinator.rounds import intake
from coordinator.rounds.fleet import Measured
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import Task
from coordinator.rounds.records import Expected
from coordinator.workers import faults
from edge_client.train.trainer import LocalResult
from edge_client.wire import arrays
from edge_client.wire.arrays import DELTA, BytesPayload
from edge_client.wire.device import TaskMessage
from strategies.params import Params, Tensors, flatten, unflatten
from strategies.strategy import BLOCK, PartialSum
from strategies.summation import Summation, clamp
from strategies.update import Update

Reply = tuple[dict[str, Any], list[bytes]]


@dataclass(frozen=True)
class RoundTerms:
    """What all clients of a round share. `work`: their message, without a client and its seed."""

    work: TaskMessage
    expected: Expected
    summation: Summation | None

    def to_json(self) -> dict[str, Any]:
        return {
            "work": self.work.to_json(),
            "expected": asdict(self.expected),
            "summation": None if self.summation is None else self.summation.to_options(),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> RoundTerms:
        expected = Expected(**document["expected"])
        shapes = {name: tuple(shape) for name, shape in expected.shapes.items()}
        summation = document["summation"]
        return RoundTerms(
            TaskMessage(**document["work"]),
            replace(expected, shapes=shapes),
            None if summation is None else Summation.from_options(summation),
        )

    def task(self, position: int, client: str, seed: int) -> Task:
        """The task of one client."""
        return Task(position, replace(self.work, client=client, seed=seed))


@dataclass(frozen=True)
class Member:
    """A client of a job. `is_summed`: False: it is trained as part of its block, but left out of the sum."""

    task: Task
    fault: str | None
    is_summed: bool


class BlockReply:
    """What a job answers: figures of its clients, sums or updates, and the clients' new state."""

    def __init__(self, terms: RoundTerms) -> None:
        self._terms = terms
        self._answers: list[list[Any]] = []
        self._updates: dict[int, list[Update]] = {}
        self._states: dict[int, bytes] = {}

    def add(self, member: Member, result: LocalResult) -> None:
        """Checks a client's result. Clients are added in the order of their positions."""
        position = member.task.position
        accepted = False
        for verdict, payload_bytes in self._uploads(member, result.update):
            if isinstance(verdict, Update) and accepted:
                verdict = intake.reject_duplicate(member.task)
            self._answers.append([position, payload_bytes, *_figures(verdict)])
            if isinstance(verdict, Update):
                accepted = True
                if member.is_summed:
                    self._updates.setdefault(position // BLOCK, []).append(self._kept(verdict))
        if result.client_state:
            self._states[position] = arrays.encode(flatten(result.client_state))

    def encode(self) -> Reply:
        """The reply of the worker."""
        values: dict[str, Any] = {"answers": self._answers, "states": list(self._states)}
        blobs = list(self._states.values())
        if self._terms.summation is None:
            updates = [update for block in self._updates.values() for update in block]
            return values, [*blobs, *(arrays.encode(_flat(update)) for update in updates)]
        values["sums"] = []
        for block, updates in self._updates.items():
            total = self._terms.summation.sum(updates)
            assert total is not None  # there is an update
            figures = [total.weight, total.num_updates, total.num_examples, total.loss_sum]
            values["sums"].append([block, *figures])
            blobs.append(encode_sum(total))
        return values, blobs

    def _uploads(self, member: Member, update: Update) -> Iterator[tuple[Update | Rejection, int]]:
        task, expected = member.task, self._terms.expected
        if member.fault is None:
            size = arrays.measure_result(task.message, update)
            yield intake.check_in_memory(update, task, expected, size), size
            return
        for payload in faults.encode_uploads(member.fault, task.message, update):
            yield intake.check(BytesPayload(payload), task, expected), len(payload)

    def _kept(self, update: Update) -> Update:
        if self._terms.summation is None:
            return update
        return clamp(update, self._terms.expected.weight_limit)


def _figures(verdict: Update | Rejection) -> list[Any]:
    if isinstance(verdict, Rejection):
        return [verdict.reason, verdict.message]
    measured = Measured.of(verdict)
    return [
        verdict.num_examples,
        verdict.num_steps,
        verdict.train_loss,
        measured.norm,
        dict(measured.streams),
    ]


def is_accepted(figures: Sequence[Any]) -> bool:
    """Whether these are the figures of an accepted update."""
    return len(figures) > 2


def parse_figures(client: str, figures: Sequence[Any]) -> Measured | Rejection:
    """The verdict of one answer; of an accepted update that was summed."""
    if not is_accepted(figures):
        return Rejection(client, intake.parse_reason(figures[0]), figures[1])
    examples, steps, _, norm, streams = figures
    return Measured(examples, steps, norm, streams)


def parse_update(figures: Sequence[Any], blob: bytes) -> Update:
    """The accepted update that a job hands over singly."""
    examples, steps, loss, *_ = figures
    streams = unflatten(arrays.decode(blob))
    return Update(streams.pop(DELTA), examples, steps, loss, streams)


def _flat(update: Update) -> Tensors:
    return flatten({DELTA: update.delta, **update.extras})


def encode_sum(total: PartialSum) -> bytes:
    """The tensors of a sum, float64, in the order of their names."""
    tensors = flatten({DELTA: total.delta, **total.extras})
    return b"".join(np.ascontiguousarray(tensors[name], np.float64).data for name in sorted(tensors))


def parse_sum(figures: Sequence[Any], blob: bytes, expected: Expected) -> PartialSum:
    """The sum in a worker's reply. `figures`: weight, updates, examples and sum of the losses."""
    values = np.frombuffer(blob, np.float64)
    tensors: Params = {}
    start = 0
    for name, shape in sorted(expected.shapes.items()):
        stop = start + int(np.prod(shape, dtype=np.int64))
        tensors[name] = values[start:stop].reshape(shape)
        start = stop
    streams = unflatten(tensors)
    weight, updates, examples, loss_sum = figures
    return PartialSum(streams.pop(DELTA), streams, weight, updates, examples, loss_sum)


def members(terms: RoundTerms, values: Mapping[str, Any]) -> list[Member]:
    """The clients of a job."""
    left_out: Collection[int] = set(values["left_out"])
    return [
        Member(
            terms.task(position, client, seed), values["faults"].get(str(position)), position not in left_out
        )
        for position, client, seed in zip(
            values["positions"], values["clients"], values["seeds"], strict=True
        )
    ]
