"""A fleet of devices without devices: every task is answered at once, by an update made of the task alone.

Rounds and tasks are rows as with real ones, so that runs, their reports and their events are what they will be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from coordinator.context.services import Services
from coordinator.db import rounds
from coordinator.db.rounds import RoundRow
from coordinator.rounds.fleet import (
    Answer,
    Model,
    OpenRound,
    Silence,
    Stopped,
    Terms,
    encode_model,
)
from coordinator.rounds.plan import Task
from coordinator.scheduling.deployments import Deployment
from edge_client.wire.device import EvaluationResult
from strategies.params import Params, Tensors
from strategies.update import Update

DEVICES = ("ada", "bob", "eve")


class FakeDevices:
    """Implements `coordinator.runs.live_evaluation.EvaluatingFleet`. In round `stops_at` it waits to be stopped."""

    def __init__(self, services: Services, deployment: Deployment, stops_at: int | None = None) -> None:
        self._services = services
        self.deployment = deployment
        self._stops_at = stops_at
        self.waiting = threading.Event()
        self._stopped = threading.Event()

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return None

    def clients(self, wanted: int) -> Sequence[str]:
        return DEVICES

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return dict.fromkeys(clients, 10)

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        return encode_model(params, streams)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self._tasks, self._terms = tasks, terms
        now, number = self._services.clock(), tasks[0].message.round
        opened = RoundRow(
            self.deployment.run,
            number,
            "open",
            terms.closing.wanted,
            terms.population,
            terms.expected,
            now,
            now,
        )
        self._services.database.write(lambda at: rounds.open_round(at, opened, model.base)).result()

    def results(self, excluded: Collection[int] = ()) -> Iterator[Answer | Silence]:
        for task in self._tasks:
            if task.message.round == self._stops_at:
                self.waiting.set()
                while not self._stopped.wait(0.01):
                    if self._services.signals.closed:
                        break
                raise Stopped
            yield Answer(task, self._update(task), 100, 1.0)

    def simulated_seconds(self) -> None:
        return None

    def cancel(self, tasks: Sequence[Task]) -> None: ...

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        return {}

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None: ...

    def evaluate(self, number: int, model: Model, seconds: float) -> dict[str, EvaluationResult]:
        sites = {"ada": "north", "bob": "north", "eve": ""}
        return {
            name: EvaluationResult(model.base, 10, 10, number + at, 5.0, sites[name])
            for at, name in enumerate(DEVICES)
        }

    def traits(self, number: int) -> dict[str, dict[str, str]]:
        return {name: {"runtime": "torch", "class": "pump" if name == "ada" else ""} for name in DEVICES}

    def stop(self) -> None:
        self._stopped.set()

    def _update(self, task: Task) -> Update:
        rng = np.random.default_rng(task.message.seed)
        delta = {
            name.removeprefix("delta/"): rng.normal(0, 0.01, shape).astype(np.float32)
            for name, shape in self._terms.expected.shapes.items()
        }
        return Update(delta, num_examples=10, num_steps=1, train_loss=1.0)


FleetOf = Callable[[Services, Deployment, float], FakeDevices]


def answering(services: Services, deployment: Deployment, patience_seconds: float) -> FakeDevices:
    return FakeDevices(services, deployment)
