"""Workers of an asynchronous simulation in this process: clients train for real on parabolas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.fleets.simulated_asynchronous import AsynchronousSimulatedFleet
from coordinator.fleets.simulated_clients import Count, Floats, SimulatedClient, VirtualTime, Work
from coordinator.workers import faults
from coordinator.workers.pool import PoolJob
from edge_client.data.examples import Examples
from edge_client.processes.channel import Frame
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies.params import Params
from tests.support.memory_fleet import MemoryClient
from tests.support.quadratic import QuadraticRuntime


class QuadraticPool:
    """Takes jobs `at_once` and answers them last first, as workers that differ in speed."""

    def __init__(self, clients: Mapping[str, MemoryClient], at_once: int = 1) -> None:
        self._clients = clients
        self._at_once = at_once
        self._versions: dict[int, Params] = {}
        self._remembered: dict[str | None, int] = {}
        self.trained: list[tuple[str, int]] = []
        self.most_versions = 0

    def broadcast(
        self, values: dict[str, Any], blobs: Sequence[bytes] = (), *, key: str | None = None
    ) -> None:
        assert values["kind"] == "version"
        kept = {at: params for at, params in self._versions.items() if at in values["needed"]}
        self._versions = kept | {values["round"]: arrays.decode(blobs[0])}
        self._remembered[key] = values["round"]
        # A worker that replaces another gets what is remembered: exactly what the others hold.
        assert set(self._remembered.values()) == set(self._versions)
        self.most_versions = max(self.most_versions, len(self._versions))

    def forget(self, key: str) -> None:
        del self._remembered[key]

    def run(self, jobs: Iterable[PoolJob]) -> Iterator[tuple[PoolJob, Frame]]:
        waiting: list[PoolJob] = []
        for job in jobs:
            waiting.append(job)
            if len(waiting) == self._at_once:
                yield self._done(waiting.pop())
        while waiting:
            yield self._done(waiting.pop())

    def _done(self, job: PoolJob) -> tuple[PoolJob, Frame]:
        task = TaskMessage.from_json(job.values["task"])
        self.trained.append((task.client, task.round))
        client = self._clients[task.client]
        rows = Examples(
            np.zeros((client.num_examples, 1), np.float32), np.zeros(client.num_examples, np.int32)
        )
        trainer = Trainer(QuadraticRuntime(client.a, client.c))
        update = trainer.train(self._versions[task.round], TrainTask.of(task, {}), rows).update
        if (fault := job.values["fault"]) is not None:
            return job, Frame({}, faults.encode_uploads(fault, task, update))
        return job, Frame({}, [encode_result(task, update)])


class Times(VirtualTime):
    """Each client answers after its own time; those named in `dropping` never do."""

    def __init__(self, seconds: Mapping[str, float], dropping: Iterable[tuple[str, int]] = ()) -> None:
        count = len(seconds)
        super().__init__(1.0, np.array([*seconds.values()]), np.zeros(count), seed=7)
        object.__setattr__(self, "_dropping", set(dropping))

    def duration_seconds(self, index: Count, work: Work) -> Floats:
        return np.array(self.factors[index])

    def find_dropouts(self, clients: Sequence[SimulatedClient], round_number: int) -> set[str]:
        dropping: set[tuple[str, int]] = self._dropping  # type: ignore[attr-defined]
        return {client.name for client in clients if (client.name, round_number) in dropping}


def fleet_of(
    clients: Mapping[str, MemoryClient],
    times: Times,
    at_once: int = 1,
    faulty: Mapping[str, str] | None = None,
) -> tuple[AsynchronousSimulatedFleet, QuadraticPool]:
    """A fleet over these clients, and its pool."""
    pool = QuadraticPool(clients, at_once)
    simulated = [
        SimulatedClient(name, index, client.num_examples, "torch", (faulty or {}).get(name))
        for index, (name, client) in enumerate(clients.items())
    ]
    return AsynchronousSimulatedFleet(pool, simulated, times), pool
