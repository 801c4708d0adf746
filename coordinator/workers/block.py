"""A job of clients: each is trained and checked where it is, and what counts of their updates is summed there.

The coordinator's process gets figures of each client and one sum for each canonical block, or, for an aggregator that needs
every update, the updates themselves. The rules are those of a real fleet: `intake` checks an update, or the bytes that a faulty
client uploads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.rounds import intake
from coordinator.rounds.fleet import Measured
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import Task
from coordinator.rounds.records import Expected
from coordinator.workers import faults
from coordinator.workers.training import ClientTask, ClientTrainer, Stack
from coordinator.workers.workspace_arrays import Workspace
from edge_client.train import schedule
from edge_client.train.trainer import LocalResult, TrainTask
from edge_client.wire import arrays
from edge_client.wire.arrays import DELTA, BytesPayload
from edge_client.wire.device import TaskMessage
from edge_client.wire.result_sizes import ResultSizes, measure_result
from strategies.params import Params, Tensors, flatten, unflatten
from strategies.strategy import BLOCK
from strategies.summation import StackedUpdates, Summation, clamp, measure_norms
from strategies.summation_tree import PartialSum, SummationTree, plus
from strategies.update import Update

Reply = tuple[dict[str, Any], list[bytes]]


@dataclass(frozen=True)
class RoundTerms:
    """What all clients of a round share.

    Attributes:
        work: their message, without a client, its seed and how much it trains.
        by_class: what updates of clients of a device class contain, instead of `expected`.
    """

    work: TaskMessage
    expected: Expected
    summation: Summation | None
    by_class: Mapping[str, Expected] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "work": self.work.to_json(),
            "expected": asdict(self.expected),
            "summation": None if self.summation is None else self.summation.to_options(),
            "by_class": {name: asdict(each) for name, each in self.by_class.items()},
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> RoundTerms:
        summation = document["summation"]
        return RoundTerms(
            TaskMessage(**document["work"]),
            _expected(document["expected"]),
            None if summation is None else Summation.from_options(summation),
            {name: _expected(each) for name, each in document["by_class"].items()},
        )

    def task(self, position: int, client: str, seed: int, epochs: int | None, steps: int | None) -> Task:
        """The task of one client."""
        return Task(position, replace(self.work, client=client, seed=seed, epochs=epochs, steps=steps))


def _expected(document: Mapping[str, Any]) -> Expected:
    expected = Expected(**document)
    return replace(expected, shapes={name: tuple(shape) for name, shape in expected.shapes.items()})


@dataclass(frozen=True)
class Member:
    """A client of a job. `is_summed`: False: it is trained as part of its block, but left out of the sum."""

    task: Task
    fault: str | None
    is_summed: bool
    device_class: str | None = None


class BlockReply:
    """What a job answers: figures of its clients, sums or updates, and the clients' new state."""

    def __init__(self, terms: RoundTerms) -> None:
        self._terms = terms
        self._answers: list[list[Any]] = []
        self._sums: dict[int, SummationTree[PartialSum]] = {}
        self._updates: list[bytes] = []
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
                    self._keep(position, verdict)
        if result.client_state:
            self._states[position] = arrays.encode(flatten(result.client_state))

    def add_stack(self, group: Sequence[Member], clients: Sequence[ClientTask], stack: Stack) -> None:
        """As `add` of each client of a stack; checked, measured and summed for all of them at once."""
        good, norms = self._check_stack(group, clients, stack)
        shapes = tuple((f"{DELTA}/{name}", value.shape[1:]) for name, value in sorted(stack.deltas.items()))
        sizes = ResultSizes.of(self._terms.work.round, self._terms.work.base, shapes)
        steps, losses = stack.steps.tolist(), stack.losses.tolist()
        for _, indices in groupby(range(len(group)), lambda index: group[index].task.position // BLOCK):
            block = list(indices)
            if not all(good[index] for index in block):
                for index in block:
                    self.add(group[index], LocalResult(stack.update(index, clients[index]), {}))
                continue
            for index in block:
                client = clients[index]
                figures = [len(client.rows), steps[index], losses[index]]
                size = sizes.measure(client.client, *figures)
                self._answers.append([group[index].task.position, size, *figures, float(norms[index]), {}])
            if summed := [index for index in block if group[index].is_summed]:
                self._sum(summed, group, clients, stack, norms)

    def encode(self) -> Reply:
        """The reply of the worker."""
        values: dict[str, Any] = {"answers": self._answers, "states": list(self._states), "sums": []}
        blobs = [*self._states.values(), *self._updates]
        for block, tree in self._sums.items():
            total = tree.total()
            assert total is not None  # a tree begins with an update
            figures = [total.weight, total.num_updates, total.num_examples, total.loss_sum]
            values["sums"].append([block, *figures])
            blobs.append(encode_sum(total))
        return values, blobs

    def _uploads(self, member: Member, update: Update) -> Iterator[tuple[Update | Rejection, int]]:
        task, terms = member.task, self._terms
        expected = terms.expected if member.device_class is None else terms.by_class[member.device_class]
        if member.fault is None:
            size = measure_result(task.message, update)
            yield intake.check_in_memory(update, task, expected, size), size
            return
        for payload in faults.encode_uploads(member.fault, task.message, update):
            yield intake.check(BytesPayload(payload), task, expected), len(payload)

    def _keep(self, position: int, update: Update) -> None:
        if self._terms.summation is None:
            self._updates.append(
                arrays.encode(_flat(update))
            )  # its arrays may be those of the next client too
            return
        counted = clamp(update, self._terms.expected.weight_limit)
        self._add_sum(position, self._terms.summation.weigh(counted))

    def _add_sum(self, position: int, partial: PartialSum) -> None:
        self._sums.setdefault(position // BLOCK, SummationTree(plus)).add(position, partial)

    def _sum(
        self,
        indices: Sequence[int],
        group: Sequence[Member],
        clients: Sequence[ClientTask],
        stack: Stack,
        norms: npt.NDArray[np.float64],
    ) -> None:
        """Adds the sum of a block whose clients are all of a stack."""
        assert self._terms.summation is not None  # `_check_stack`
        first, last = indices[0], indices[-1]
        # A slice is no copy.
        chosen: Any = slice(first, last + 1) if last - first + 1 == len(indices) else list(indices)
        updates = StackedUpdates(
            {name: value[chosen] for name, value in stack.deltas.items()},
            [len(clients[index].rows) for index in indices],
            stack.losses[chosen].tolist(),
            norms[chosen],
        )
        positions = [group[index].task.position for index in indices]
        limit = self._terms.expected.weight_limit
        self._add_sum(positions[0], self._terms.summation.sum_stack(positions, updates, limit))

    def _check_stack(
        self, group: Sequence[Member], clients: Sequence[ClientTask], stack: Stack
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
        """Whether the intake would accept each client's update, and their norms; where this is not plain, it is False."""
        expected = self._terms.expected
        shapes = {f"{DELTA}/{name}": value.shape[1:] for name, value in stack.deltas.items()}
        is_float32 = all(value.dtype == np.float32 for value in stack.deltas.values())
        if self._terms.summation is None or shapes != expected.shapes or not is_float32:
            return np.zeros(len(group), np.bool_), np.zeros(len(group))
        most = expected.max_examples if expected.max_examples is not None else arrays.LARGEST_COUNT
        steps = [
            schedule.count(len(each.rows), work.batch_size, epochs=work.epochs, steps=work.steps)
            if 1 <= len(each.rows) <= most and member.fault is None
            else -1
            for member, each in zip(group, clients, strict=True)
            for work in [each.task]
        ]
        norms = measure_norms(stack.deltas, len(group))
        # In float64 the norm of finite float32 values is finite.
        return np.isfinite(stack.losses) & (stack.steps == steps) & np.isfinite(norms), norms


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


class ClientFailed(Exception):
    """The training of one client failed; the message begins with who it is, the cause says why."""


@dataclass(frozen=True)
class RoundStart:
    """What the jobs of a round start from."""

    params: Params
    streams: Mapping[str, Params]
    terms: RoundTerms


class _Group(NamedTuple):
    """What clients have in common that train together."""

    epochs: int | None
    steps: int | None
    runtime: str
    device_class: str | None
    wave: int


def train(
    start: RoundStart,
    values: Mapping[str, Any],
    states: Sequence[bytes],
    data: Workspace,
    trainer_for: Callable[[str, str | None], ClientTrainer],
) -> Reply:
    """The reply to a job. `trainer_for`: how clients of a runtime and of a device class train.

    Raises:
        ClientFailed: a client cannot be trained.
    """
    left_out, kept = set(values["left_out"]), dict(zip(values["states"], states, strict=True))
    groups: dict[_Group, list[tuple[Member, ClientTask]]] = {}
    order: list[tuple[Member, _Group]] = []
    columns = ("positions", "clients", "seeds", "parts", "epochs", "steps", "runtimes", "classes", "waves")
    for position, client, seed, part, *alike in zip(*map(values.__getitem__, columns), strict=True):
        group_key = _Group(*alike)
        task = start.terms.task(position, client, seed, group_key.epochs, group_key.steps)
        state = unflatten(arrays.decode(kept[position])) if position in kept else {}
        fault = values["faults"].get(str(position))
        member = Member(task, fault, position not in left_out, group_key.device_class)
        work = ClientTask(client, TrainTask.of(task.message, start.streams), data.part(part), state)
        groups.setdefault(group_key, []).append((member, work))
        order.append((member, group_key))
    reply = BlockReply(start.terms)
    trained: dict[_Group, Iterator[LocalResult]] = {}
    for together, group in groups.items():
        clients = [client for _, client in group]
        trainer = trainer_for(together.runtime, together.device_class)
        results = trainer.train(start.params, clients, data)
        if isinstance(results, Stack) and len(groups) == 1:
            reply.add_stack([member for member, _ in group], clients, results)
            return reply.encode()
        if isinstance(results, Stack):
            results = results.results(clients)
        trained[together] = _named(results, clients, f"{together.runtime} client", start.terms.work.round)
    for member, group_key in order:
        reply.add(member, next(trained[group_key]))
    return reply.encode()


def _named(
    results: Iterable[LocalResult], clients: Sequence[ClientTask], what: str, number: int
) -> Iterator[LocalResult]:
    """The results; an error says whose training failed."""
    following = iter(results)
    for each in clients:
        try:
            result = next(following)
        except Exception as error:
            raise ClientFailed(f"{what} {each.client}, round {number}: ") from error
        yield result
