"""The simulated fleet decides who answers when; how its workers share the work does not show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from coordinator.fleets.simulated import SimulatedClient, SimulatedFleet, VirtualTime
from coordinator.rounds import intake, plan
from coordinator.rounds.closing import Closing
from coordinator.rounds.fleet import (
    Answer,
    Model,
    Silence,
    Terms,
    encode_model,
)
from coordinator.rounds.plan import LocalWork, Task
from coordinator.workers.pool import Job, WorkerPool
from edge_client.processes.channel import Frame
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from tests.support.federation import PARAMS, run_plan, steps_of, update

SECONDS = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 1.0}
"""When each client answers: one local step, times a factor of its own."""


class BackwardPool:
    """A pool that takes jobs `at_once` and answers them last first; every upload is honest."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self.jobs: dict[str, dict[str, Any]] = {}

    @property
    def drawn(self) -> list[str]:
        """Clients in the order in which their jobs were taken."""
        return list(self.jobs)

    def broadcast(self, values: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        pass

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Frame]]:
        waiting: list[Job] = []
        for job in jobs:
            self.jobs[job.values["task"]["client"]] = job.values
            waiting.append(job)
            if len(waiting) == self._at_once:
                while waiting:
                    yield self._done(waiting.pop())
        while waiting:
            yield self._done(waiting.pop())

    def _done(self, job: Job) -> tuple[Job, Frame]:
        message = TaskMessage.from_json(job.values["task"])
        sent = replace(update({"w": PARAMS["w"]}), num_steps=steps_of(message, 10))
        payload = encode_result(message, sent)
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
    return plan.make_tasks(tuple(SECONDS), 1, model.base, run_plan(local=local))


MODEL = encode_model(PARAMS, {})


def submit(simulated: SimulatedFleet, *, until: float = 100.0, wanted: int = 99, **work: Any) -> None:
    expected = intake.make_expected({"w": PARAMS["w"]}, {})
    simulated.submit(tasks(MODEL, **work), MODEL, Terms(expected, Closing(wanted, until), len(SECONDS)))


def arrivals(simulated: SimulatedFleet) -> list[tuple[str, float]]:
    return [
        (result.task.message.client, result.seconds)
        for result in simulated.results()
        if isinstance(result, Answer)
    ]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_results_come_in_virtual_time_however_the_workers_finish(at_once: int) -> None:
    simulated = fleet(BackwardPool(at_once))
    submit(simulated)
    assert arrivals(simulated) == [("b", 1.0), ("d", 1.0), ("c", 2.0), ("a", 3.0)]


def test_clients_are_trained_in_the_order_in_which_they_answer() -> None:
    pool = BackwardPool(at_once=1)
    simulated = fleet(pool)
    submit(simulated)
    results = simulated.results()
    next(results)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert pool.drawn == ["b", "d"]


def test_results_end_with_the_last_one_wanted_and_nobody_else_is_trained() -> None:
    pool = BackwardPool(at_once=1)
    simulated = fleet(pool)
    submit(simulated, wanted=3)
    assert arrivals(simulated) == [("b", 1.0), ("d", 1.0), ("c", 2.0)]
    assert pool.drawn == ["b", "d", "c"]


def test_a_client_too_late_is_never_trained() -> None:
    pool = BackwardPool(at_once=2)
    simulated = fleet(pool)
    submit(simulated, until=2.5)
    results = list(simulated.results())
    assert pool.drawn == ["b", "d", "c"]
    assert [(r.task.message.client, r.reason) for r in results if isinstance(r, Silence)] == [
        ("a", "not done by the deadline")
    ]


def test_a_client_that_drops_out_is_silent_and_never_trained() -> None:
    pool = BackwardPool(at_once=2)
    simulated = fleet(pool, dropout=1.0)
    submit(simulated)
    results = list(simulated.results())
    assert pool.drawn == []
    assert [(r.task.message.client, r.reason) for r in results if isinstance(r, Silence)] == [
        (name, "dropped out") for name in SECONDS
    ]


def test_time_is_counted_in_local_steps() -> None:
    """Clients of 10, 20, 30 and 40 examples, two epochs in batches of 4: 6, 10, 16 and 20 steps."""
    simulated = fleet(BackwardPool(at_once=4))
    submit(simulated, epochs=2, steps=None)
    assert arrivals(simulated) == [("b", 10.0), ("a", 18.0), ("d", 20.0), ("c", 32.0)]


def test_two_uploads_of_one_client_arrive_together_and_the_second_is_a_duplicate() -> None:
    simulated = fleet(BackwardPool(at_once=4), fault="duplicate")
    submit(simulated)
    answers = [result for result in simulated.results() if isinstance(result, Answer)]
    assert [answer.task.message.client for answer in answers] == ["b", "d", "c", "c", "a"]
    assert [getattr(answer.verdict, "reason", None) for answer in answers] == [
        None, None, None, "duplicate", None,
    ]  # fmt: skip


def test_a_job_names_rows_runtime_and_fault_of_its_client() -> None:
    pool = BackwardPool(at_once=4)
    simulated = fleet(pool, fault="nan")
    submit(simulated)
    assert len(list(simulated.results())) == 4
    assert {name: (job["part"], job["runtime"], job["fault"]) for name, job in pool.jobs.items()} == {
        "a": (0, "torch", None), "b": (1, "torch", None), "c": (2, "torch", "nan"), "d": (3, "torch", None),
    }  # fmt: skip
