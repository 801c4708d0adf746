"""A job of clients: each is trained and checked where it is, and what counts of their updates is summed there.

The coordinator's process gets figures of each client and one sum for each canonical block, or, for an aggregator that needs
every update, the updates themselves. The rules are those of a real fleet: `intake` checks an update, or the bytes that a faulty
client uploads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.rounds import intake
from coordinator.rounds.fleet import BlockSum, Measured
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import Task
from coordinator.workers import faults
from coordinator.workers.training import ClientTasks, ClientTrainer, Stack, name_failures
from coordinator.workers.workspace_arrays import Workspace
from edge_client.relay.expected import Expected
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
            "expected": vars(self.expected),
            "summation": None if self.summation is None else self.summation.to_options(),
            "by_class": {name: vars(each) for name, each in self.by_class.items()},
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


class Kind(NamedTuple):
    """What clients have in common that train together."""

    epochs: int | None
    steps: int | None
    runtime: str
    device_class: str | None
    wave: int


class Members:
    """The clients of a job in the order of their positions, by column; a `Member` is made when one is asked for.

    `positions`, `clients`, `seeds`: columns. `kinds`: what several of them have in common; `kind_of`: the index of each client's.
    """

    def __init__(self, terms: RoundTerms, values: Mapping[str, Any]) -> None:
        self._terms = terms
        self.positions: list[int] = values["positions"]
        self.clients: list[str] = values["clients"]
        self.seeds: list[int] = values["seeds"]
        self.kinds = [Kind(*each) for each in values["kinds"]]
        self.kind_of: list[int] = values["kind_of"] or [0] * len(self.positions)
        self.faults = {int(position): fault for position, fault in values["faults"].items()}
        self.left_out = set(values["left_out"])

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Member:
        position, kind = self.positions[index], self.kinds[self.kind_of[index]]
        task = self._terms.task(position, self.clients[index], self.seeds[index], kind.epochs, kind.steps)
        return Member(task, self.faults.get(position), position not in self.left_out, kind.device_class)

    def of_kind(self, kind: int) -> Sequence[int]:
        """The indices of the clients of one kind."""
        if len(self.kinds) == 1:
            return range(len(self))
        return [index for index, each in enumerate(self.kind_of) if each == kind]


@dataclass(frozen=True)
class Checked:
    """What the intake found of the clients of a stack, in their order. `is_good`: False: it has to look at the client singly."""

    is_good: npt.NDArray[np.bool_]
    examples: Sequence[int]
    steps: Sequence[int]
    losses: Sequence[float]
    norms: npt.NDArray[np.float64]


class BlockReply:
    """What a job answers: figures of its clients, sums or updates, and the clients' new state.

    `is_whole`: nobody can join the blocks of this job later, so their sums are joined to larger nodes of the tree.
    """

    def __init__(self, terms: RoundTerms, is_whole: bool = False) -> None:
        self._terms = terms
        self._is_whole = is_whole
        self._answers: list[list[Any]] = []
        self._accepted: list[Sequence[float]] = []
        self._trees: dict[int, SummationTree[PartialSum]] = {}
        self._sums: list[BlockSum] = []
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

    def add_stack(self, members: Members, clients: ClientTasks, stack: Stack) -> None:
        """As `add` of each client of a stack; checked, measured and summed for all of them at once."""
        checked = self._check_stack(members, clients, stack)
        if checked.is_good.all():
            self._accept(range(len(members)), members, stack, checked)
            return
        for _, indices in groupby(range(len(members)), lambda index: members.positions[index] // BLOCK):
            block = list(indices)
            if checked.is_good[block].all():
                self._accept(block, members, stack, checked)
                continue
            for index in block:
                self.add(members[index], LocalResult(stack.update(index, checked.examples[index]), {}))

    def encode(self) -> Reply:
        """The reply of the worker."""
        for block, tree in self._trees.items():
            total = tree.total()
            assert total is not None  # a tree begins with an update
            self._sums.append(BlockSum(block, total, block))
        accepted = np.array(self._accepted, np.float64).tobytes()
        values = {
            "answers": self._answers,
            "accepted": len(self._accepted),
            "states": list(self._states),
            "sums": [_describe_sum(each) for each in self._sums],
        }
        sums = [_encode_sum(each.partial) for each in self._sums]
        return values, [accepted, *self._states.values(), *self._updates, *sums]

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
        self._trees.setdefault(position // BLOCK, SummationTree(plus)).add(position, partial)

    def _accept(self, indices: Sequence[int], members: Members, stack: Stack, checked: Checked) -> None:
        """Accepts clients of a stack, whole blocks in the order of their positions, and adds their sums."""
        shapes = tuple((f"{DELTA}/{name}", value.shape[1:]) for name, value in sorted(stack.deltas.items()))
        sizes = ResultSizes.of(self._terms.work.round, self._terms.work.base, shapes)
        clients = [members.clients[index] for index in indices]
        examples = [checked.examples[index] for index in indices]
        steps = [checked.steps[index] for index in indices]
        losses = [checked.losses[index] for index in indices]
        payload_bytes = sizes.measure_each(clients, examples, steps, losses)
        positions, norms = [members.positions[index] for index in indices], checked.norms[indices].tolist()
        self._accepted += zip(positions, payload_bytes, examples, steps, norms, strict=True)
        summed = indices
        if members.left_out:
            summed = [index for index in indices if members.positions[index] not in members.left_out]
        ranges = [summed]
        if not self._is_whole:
            blocks = groupby(summed, lambda index: members.positions[index] // BLOCK)
            ranges = [list(each) for _, each in blocks]
        for each in ranges:
            if each:
                self._sum(each, members, stack, checked)

    def _sum(self, indices: Sequence[int], members: Members, stack: Stack, checked: Checked) -> None:
        """Adds the sums of clients of a stack: the largest nodes of the tree within their blocks."""
        assert self._terms.summation is not None  # `_check_stack`
        first, last = indices[0], indices[-1]
        # A slice is no copy.
        chosen: Any = slice(first, last + 1) if last - first + 1 == len(indices) else list(indices)
        updates = StackedUpdates(
            {name: value[chosen] for name, value in stack.deltas.items()},
            [checked.examples[index] for index in indices],
            [checked.losses[index] for index in indices],
            checked.norms[chosen],
        )
        positions = [members.positions[index] for index in indices]
        within = (positions[0] // BLOCK * BLOCK, (positions[-1] // BLOCK + 1) * BLOCK)
        limit = self._terms.expected.weight_limit
        nodes = self._terms.summation.sum_stack(positions, updates, limit, within)
        starts = [position // BLOCK for position, _ in nodes]
        for (_, partial), block, following in zip(
            nodes, starts, [*starts[1:], within[1] // BLOCK], strict=True
        ):
            self._sums.append(BlockSum(block, partial, following - 1))

    def _check_stack(self, members: Members, clients: ClientTasks, stack: Stack) -> Checked:
        """What the intake would find of each client's update; where this is not plain, the client is not good."""
        expected, work = self._terms.expected, clients.task
        shapes = {f"{DELTA}/{name}": value.shape[1:] for name, value in stack.deltas.items()}
        is_float32 = all(value.dtype == np.float32 for value in stack.deltas.values())
        examples, losses = list(map(len, clients.rows)), stack.losses.tolist()
        steps = stack.steps.tolist()
        if self._terms.summation is None or shapes != expected.shapes or not is_float32:
            nobody = np.zeros(len(members), np.bool_)
            return Checked(nobody, examples, steps, losses, np.zeros(len(members)))
        most = expected.max_examples if expected.max_examples is not None else arrays.LARGEST_COUNT
        counts = {
            count: schedule.count(count, work.batch_size, epochs=work.epochs, steps=work.steps)
            if 1 <= count <= most
            else -1
            for count in set(examples)
        }
        is_right = [counts[count] == taken for count, taken in zip(examples, steps, strict=True)]
        if members.faults:
            is_right = [
                right and position not in members.faults
                for right, position in zip(is_right, members.positions, strict=True)
            ]
        norms = measure_norms(stack.deltas, len(members))
        # In float64 the norm of finite float32 values is finite.
        is_good = np.isfinite(stack.losses) & np.array(is_right) & np.isfinite(norms)
        return Checked(is_good, examples, steps, losses, norms)


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


def _flat(update: Update) -> Tensors:
    return flatten({DELTA: update.delta, **update.extras})


def _describe_sum(each: BlockSum) -> list[Any]:
    total = each.partial
    return [
        each.block,
        each.last_block,
        total.weight,
        total.num_updates,
        total.num_examples,
        total.loss_sum,
    ]


def _encode_sum(total: PartialSum) -> bytes:
    """The tensors of a sum, float64, in the order of their names."""
    tensors = flatten({DELTA: total.delta, **total.extras})
    return b"".join(np.ascontiguousarray(tensors[name], np.float64).data for name in sorted(tensors))


@dataclass(frozen=True)
class RoundStart:
    """What the jobs of a round start from. `models`: of device classes whose model is not the run's own."""

    params: Params
    streams: Mapping[str, Params]
    terms: RoundTerms
    models: Mapping[str, Params] = field(default_factory=dict)

    def params_of(self, device_class: str | None) -> Params:
        """What clients of a class receive; a narrower model is a part of it."""
        return self.models.get(device_class or "", self.params)


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
    members = Members(start.terms, values)
    kept = {
        position: unflatten(arrays.decode(state))
        for position, state in zip(values["states"], states, strict=True)
    }
    reply = BlockReply(start.terms, values["is_whole"])
    trained: list[Iterator[LocalResult]] = []
    for number, kind in enumerate(members.kinds):
        indices = members.of_kind(number)
        clients = ClientTasks(
            TrainTask.of(members[indices[0]].task.message, start.streams),
            [members.clients[index] for index in indices],
            [members.seeds[index] for index in indices],
            [data.part(values["parts"][index]) for index in indices],
            [kept.get(members.positions[index], {}) for index in indices] if kept else None,
        )
        own = start.params_of(kind.device_class)
        results = trainer_for(kind.runtime, kind.device_class).train(own, clients, data)
        if isinstance(results, Stack) and len(members.kinds) == 1:
            reply.add_stack(members, clients, results)
            return reply.encode()
        if isinstance(results, Stack):
            results = results.results(clients)
        trained.append(
            name_failures(results, clients.clients, f"{kind.runtime} client", start.terms.work.round)
        )
    for index, number in enumerate(members.kind_of):
        reply.add(members[index], next(trained[number]))
    return reply.encode()
