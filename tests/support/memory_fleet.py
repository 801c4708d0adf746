"""A fleet in this process: clients train for real on parabolas and answer by a script, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from coordinator.rounds.plan import Task
from edge_client.data.examples import Examples
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire.arrays import BytesPayload, FilePayload, encode_result
from edge_client.wire.device import TaskMessage
from strategies.params import Params, Tensors
from strategies.update import Update
from tests.support.quadratic import QuadraticRuntime

Script = Callable[[TaskMessage, Update], Iterable[tuple[float, bytes]]]
"""What a client uploads, and after how many seconds; nothing at all is silence."""


def honest(seconds: float) -> Script:
    """One upload of the update."""
    return lambda task, update: [(seconds, encode_result(task, update))]


@dataclass(frozen=True)
class MemoryClient:
    """A client whose loss is a/2 · (w − c)², with `num_examples` rows of nothing."""

    a: float = 1.0
    c: float = 0.0
    num_examples: int = 8
    script: Script = field(default_factory=lambda: honest(1.0))


@dataclass(frozen=True)
class _Upload:
    seconds: float
    task: Task
    payload: bytes


class MemoryFleet:
    """Implements `coordinator.rounds.fleet.Fleet` over clients by name."""

    def __init__(self, clients: Mapping[str, MemoryClient]) -> None:
        self._clients = dict(clients)
        self._tasks: dict[int, Task] = {}
        self._uploads: list[_Upload] = []
        self._terms: Terms | None = None
        self._lasted = 0.0
        self._kept: dict[str, Mapping[str, Params]] = {}
        self._renewed: dict[str, Mapping[str, Params]] = {}

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return None

    def clients(self, wanted: int) -> Sequence[str]:
        return list(self._clients)

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return {name: self._clients[name].num_examples for name in clients}

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        return encode_model(params, streams)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self._terms = terms
        self._renewed = {}
        self._tasks = {task.position: task for task in tasks}
        uploads = [upload for task in tasks for upload in self._train(task, model)]
        self._uploads = sorted(uploads, key=lambda each: (each.seconds, each.task.position))

    def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence]:
        assert self._terms is not None
        closing, accepted = self._terms.closing, set[str]()
        self._lasted = 0.0
        unanswered = dict(self._tasks)
        for upload in self._uploads:
            if closing.is_past(upload.seconds):
                break
            unanswered.pop(upload.task.position, None)
            client = upload.task.message.client
            verdict = intake.check(BytesPayload(upload.payload), upload.task, self._terms.expected)
            if isinstance(verdict, Update) and client in accepted:
                verdict = intake.reject_duplicate(upload.task)
            if isinstance(verdict, Update):
                accepted.add(client)
            self._lasted = upload.seconds
            yield Answer(upload.task, verdict, len(upload.payload), upload.seconds)
            if closing.is_complete(len(accepted)):
                return
        for task in unanswered.values():
            self._lasted = closing.deadline_seconds
            yield Silence(task, "did not answer", closing.deadline_seconds)

    def simulated_seconds(self) -> float:
        return self._lasted

    def cancel(self, tasks: Sequence[Task]) -> None:
        gone = {task.position for task in tasks}
        self._uploads = [upload for upload in self._uploads if upload.task.position not in gone]
        self._tasks = {at: task for at, task in self._tasks.items() if at not in gone}

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        changed = {name: self._renewed[name] for name in accepted if self._renewed.get(name)}
        self._kept |= changed
        return changed

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        self._kept = dict(states)

    def _train(self, task: Task, model: Model) -> list[_Upload]:
        work = task.message
        client = self._clients[work.client]
        rows = Examples(
            np.zeros((client.num_examples, 1), np.float32), np.zeros(client.num_examples, np.int32)
        )
        result = Trainer(QuadraticRuntime(client.a, client.c)).train(
            dict(model.params), TrainTask.of(work, _params(model.streams)), rows, self._kept.get(work.client)
        )
        self._renewed[work.client] = result.client_state
        return [_Upload(seconds, task, payload) for seconds, payload in client.script(work, result.update)]


class StoringFleet(MemoryFleet):
    """A fleet whose accepted updates lie in files."""

    def __init__(self, clients: Mapping[str, MemoryClient], folder: Path) -> None:
        super().__init__(clients)
        self._folder = folder

    def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence]:
        for result in super().results(excluded):
            if isinstance(result, Answer) and isinstance(result.verdict, Update):
                path = self._folder / f"{result.task.message.round}-{result.task.position}"
                path.write_bytes(encode_result(result.task.message, result.verdict))
                result = replace(result, verdict=intake.read_accepted(FilePayload(path)))
            yield result


def _params(streams: Mapping[str, Tensors]) -> dict[str, Params]:
    return {stream: dict(tensors) for stream, tensors in streams.items()}
