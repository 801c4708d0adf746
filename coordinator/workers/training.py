"""How a worker trains the clients of a job: one after the other, or all of them as one computation.

A `ClientTrainer` only trains. Whether a result counts, and what becomes of it, is decided in `coordinator.workers.block`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coordinator.workers.workspace_arrays import Workspace
from edge_client.data.examples import Examples, NoExamples
from edge_client.train.trainer import LocalResult, Runtime, Trainer, TrainTask
from strategies.client_rules import Correction
from strategies.params import Params, materialize
from strategies.slices import Shapes, take
from strategies.update import Update, apply_all


@dataclass(frozen=True)
class ClientTask:
    """The work of one client of a job.

    Attributes:
        rows: its rows of the workspace.
        state: what it has kept since its last accepted update.
    """

    client: str
    task: TrainTask
    rows: npt.NDArray[np.int64]
    state: Mapping[str, Params]


@dataclass(frozen=True)
class ClientTasks:
    """The work of several clients that differ in their seeds, rows and states only, by column.

    Attributes:
        task: of any of them; `seeds` holds the seed of each.
        states: None: none of them has kept anything.
    """

    task: TrainTask
    clients: Sequence[str]
    seeds: Sequence[int]
    rows: Sequence[npt.NDArray[np.int64]]
    states: Sequence[Mapping[str, Params]] | None = None

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[ClientTask]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> ClientTask:
        state = self.states[index] if self.states is not None else {}
        return ClientTask(
            self.clients[index], replace(self.task, seed=self.seeds[index]), self.rows[index], state
        )

    def begin(self) -> list[Correction]:
        """How the steps of each client differ from plain SGD.

        Raises:
            NoExamples: a client has no rows.
        """
        if not all(map(len, self.rows)):
            raise NoExamples("no local examples to train on")
        if self.states is None:
            return [self.task.begin({})] * len(self)
        return [self.task.begin(state) for state in self.states]

    @staticmethod
    def of(clients: Sequence[ClientTask]) -> ClientTasks:
        """The columns of at least one client."""
        return ClientTasks(
            clients[0].task,
            [each.client for each in clients],
            [each.task.seed for each in clients],
            [each.rows for each in clients],
            [each.state for each in clients],
        )


@dataclass(frozen=True)
class Stack:
    """What clients have learnt that trained as one computation, in their order, by a rule that sends nothing but the delta.

    Attributes:
        deltas: trained minus base by tensor name, float32 [clients, …]. The next call of the trainer may overwrite them.
        steps: steps that each client took, int64 [clients].
        losses: each client's mean training loss per example over its steps, float64 [clients].
    """

    deltas: Params
    steps: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float64]

    def update(self, index: int, num_examples: int) -> Update:
        """The update of one client. Its arrays are parts of the stack's."""
        # `asarray`, because one value of an array is a scalar.
        delta = {name: np.asarray(value[index]) for name, value in sorted(self.deltas.items())}
        return Update(delta, num_examples, int(self.steps[index]), float(self.losses[index]))

    def results(self, clients: ClientTasks) -> list[LocalResult]:
        """The result of each client, copied."""
        copied = Stack({name: value.copy() for name, value in self.deltas.items()}, self.steps, self.losses)
        return [LocalResult(copied.update(index, len(rows)), {}) for index, rows in enumerate(clients.rows)]


def complete(stack: Stack, clients: ClientTasks, corrections: Sequence[Correction]) -> Iterator[LocalResult]:
    """Each client's update after the transforms of its task. It is copied now, because the next call overwrites the stack."""
    copied = stack.results(clients)
    return (
        LocalResult(*apply_all(client.task.transforms(correction), each.update, client.state))
        for client, correction, each in zip(clients, corrections, copied, strict=True)
    )


class ClientTrainer(Protocol):
    """Trains several clients from the same params."""

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterable[LocalResult] | Stack:
        """The result of each client, in order; a single one may be overwritten once the next is asked for.

        A result may depend, in its last bits, on the other clients of the call: who they are follows from the cohort alone.
        """


@dataclass(frozen=True)
class OneByOne:
    """Trains one client after the other in a runtime."""

    runtime: Runtime

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterator[LocalResult]:
        trainer = Trainer(self.runtime)
        for each in clients:
            examples = Examples(data.x[each.rows], data.y[each.rows])
            yield trainer.train(params, each.task, examples, each.state)


@dataclass(frozen=True)
class OnSlices:
    """Trains the model of a device class, whose params are the leading parts of these `shapes`; all of them if it is no narrower one."""

    narrower: ClientTrainer
    shapes: Shapes

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterable[LocalResult] | Stack:
        return self.narrower.train(materialize(take(params, self.shapes)), clients, data)


class ClientFailed(Exception):
    """The training of one client failed; the message begins with who it is, the cause says why."""


def name_failures(
    results: Iterable[LocalResult], clients: Sequence[str], what: str, number: int
) -> Iterator[LocalResult]:
    """The results; an error says whose training failed.

    Raises:
        ClientFailed: a result could not be made.
    """
    following = iter(results)
    for each in clients:
        try:
            result = next(following)
        except Exception as error:
            raise ClientFailed(f"{what} {each}, round {number}: ") from error
        yield result
