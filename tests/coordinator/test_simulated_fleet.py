"""The simulated fleet decides who answers when; how its workers share the work does not show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from coordinator.fleets.fleet import Delivery, Model, Silence
from coordinator.fleets.simulated import SimulatedClient, SimulatedFleet
from coordinator.rounds import engine, plan
from coordinator.rounds.plan import LocalWork, Task
from coordinator.simulation.frames import Frame
from coordinator.simulation.pool import Job, WorkerPool
from coordinator.simulation.virtual_time import VirtualTime
from edge_client.wire import arrays
from tests.support.federation import PARAMS, run_plan

SECONDS = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 1.0}
"""When each client answers: one local step, times a factor of its own."""


class BackwardPool:
    """A pool that takes jobs `at_once` and answers them last first; an upload is the job's values, as JSON."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self.drawn: list[str] = []

    def tell(self, values: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        pass

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Frame]]:
        waiting: list[Job] = []
        for job in jobs:
            self.drawn.append(job.values["task"]["client"])
            waiting.append(job)
            if len(waiting) == self._at_once:
                while waiting:
                    yield self._done(waiting.pop())
        while waiting:
            yield self._done(waiting.pop())

    def _done(self, job: Job) -> tuple[Job, Frame]:
        payload = json.dumps(job.values).encode()
        state = arrays.encode({"control/w": np.ones(1, np.float32)})
        return job, Frame({}, (*[payload] * (2 if job.values["fault"] == "duplicate" else 1), state))


def fleet(pool: BackwardPool, *, dropout: float = 0.0, fault: str | None = None) -> SimulatedFleet:
    clients = [
        SimulatedClient(name, index, 10 * (index + 1), "torch", fault if name == "c" else None)
        for index, name in enumerate(SECONDS)
    ]
    return SimulatedFleet(cast(WorkerPool, pool), clients, VirtualTime(1.0, SECONDS, dropout, seed=7))


def tasks(model: Model, **work: Any) -> tuple[Task, ...]:
    local = LocalWork(**{"batch_size": 4, "lr": 0.1, "epochs": None, "steps": 1} | work)
    return plan.tasks_for(tuple(SECONDS), 1, model.base, run_plan(local=local))


MODEL = engine.model_of(PARAMS, {})


def arrivals(simulated: SimulatedFleet, until: float = 100.0) -> list[tuple[str, float]]:
    return [
        (result.task.message.client, result.seconds)
        for result in simulated.results(until)
        if isinstance(result, Delivery)
    ]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_results_come_in_virtual_time_however_the_workers_finish(at_once: int) -> None:
    simulated = fleet(BackwardPool(at_once))
    simulated.submit(tasks(MODEL), MODEL)
    assert arrivals(simulated) == [("b", 1.0), ("d", 1.0), ("c", 2.0), ("a", 3.0)]


def test_clients_are_trained_in_the_order_in_which_they_answer() -> None:
    pool = BackwardPool(at_once=1)
    simulated = fleet(pool)
    simulated.submit(tasks(MODEL), MODEL)
    results = simulated.results(until=100.0)
    next(results)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert pool.drawn == ["b", "d"]


def test_a_client_too_late_is_never_trained() -> None:
    pool = BackwardPool(at_once=2)
    simulated = fleet(pool)
    simulated.submit(tasks(MODEL), MODEL)
    results = list(simulated.results(until=2.5))
    assert pool.drawn == ["b", "d", "c"]
    assert [(r.task.message.client, r.reason) for r in results if isinstance(r, Silence)] == [
        ("a", "not done by the deadline")
    ]


def test_a_client_that_drops_out_is_silent_and_never_trained() -> None:
    pool = BackwardPool(at_once=2)
    simulated = fleet(pool, dropout=1.0)
    simulated.submit(tasks(MODEL), MODEL)
    results = list(simulated.results(until=100.0))
    assert pool.drawn == []
    assert [(r.task.message.client, r.reason) for r in results if isinstance(r, Silence)] == [
        (name, "dropped out") for name in SECONDS
    ]


def test_time_is_counted_in_local_steps() -> None:
    """Clients of 10, 20, 30 and 40 examples, two epochs in batches of 4: 6, 10, 16 and 20 steps."""
    simulated = fleet(BackwardPool(at_once=4))
    simulated.submit(tasks(MODEL, epochs=2, steps=None), MODEL)
    assert arrivals(simulated) == [("b", 10.0), ("a", 18.0), ("d", 20.0), ("c", 32.0)]


def test_two_uploads_of_one_client_arrive_together() -> None:
    simulated = fleet(BackwardPool(at_once=4), fault="duplicate")
    simulated.submit(tasks(MODEL), MODEL)
    assert [client for client, _ in arrivals(simulated)] == ["b", "d", "c", "c", "a"]


def test_a_job_names_rows_runtime_and_fault_of_its_client() -> None:
    simulated = fleet(BackwardPool(at_once=4), fault="nan")
    simulated.submit(tasks(MODEL), MODEL)
    jobs = {
        result.task.message.client: json.loads(result.payload)
        for result in simulated.results(100.0)
        if isinstance(result, Delivery)
    }
    assert {name: (job["part"], job["runtime"], job["fault"]) for name, job in jobs.items()} == {
        "a": (0, "torch", None), "b": (1, "torch", None), "c": (2, "torch", "nan"), "d": (3, "torch", None),
    }  # fmt: skip
