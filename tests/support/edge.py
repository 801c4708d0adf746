"""An edge daemon for tests: the real agent, with a training of its own that takes no framework."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_client import config
from edge_client.daemon.agent import Agent
from edge_client.daemon.executor import Executor
from edge_client.daemon.heartbeat import WakeupPipe
from edge_client.daemon.host_environment import HostEnvironment
from edge_client.outbox import Ledger, Outbox
from edge_client.state import State
from edge_client.train.class_scores import class_scores
from edge_client.train.process import Done, Interrupted, TrainingFailed, TrainingJob
from edge_client.transport import identity
from edge_client.wire import arrays
from edge_client.wire.device import to_json
from tests.support.fake_coordinator import FakeCoordinator

DATA = ["data.digits.kind=csv", "data.digits.path=/nowhere/digits.csv"]


@dataclass
class FakeTraining:
    """Writes a result as training does. `busy`: called until it returns False, asking on between the calls."""

    jobs: list[TrainingJob] = field(default_factory=list)
    busy: Callable[[], bool] = lambda: False
    failure: TrainingFailed | None = None
    size: int = 1000
    treated: tuple[str, ...] = ()
    closed: bool = False
    quantity: dict[str, Any] = field(default_factory=dict)

    def run(self, job: TrainingJob, stop_reason: Callable[[], str | None]) -> Done:
        self.jobs.append(job)
        while True:
            if reason := stop_reason():
                raise Interrupted(reason)
            if not self.busy():
                break
        if self.failure is not None:
            raise self.failure
        if job.kind == "evaluate":
            logits = np.array([[3.0, -3.0], [3.0, -3.0], [-3.0, 3.0], [-3.0, 3.0], [-3.0, 3.0]], np.float32)
            scores = to_json(class_scores(logits, np.array([0, 0, 0, 1, 1], np.int32)))
            figures = {
                "rows": 5,
                "labels": 5,
                "correct": 4,
                "loss_sum": 1.5,
                "scores": scores,
                **self.quantity,
            }
            job.result.write_text(json.dumps(figures))
            return Done(rows=5, seconds=0.1, peak_memory_bytes=1)
        if job.kind == "statistics":
            job.result.write_text(json.dumps({"rows": 40, "minimum_count": job.message["minimum_count"]}))
            return Done(rows=40, seconds=0.1, peak_memory_bytes=1, treated=("counts below 20 withheld",))
        rng = np.random.default_rng(len(self.jobs))
        job.result.write_bytes(arrays.encode({"delta/w": rng.standard_normal(self.size, np.float32)}))
        job.state_out.write_bytes(f"state {len(self.jobs)}".encode())
        return Done(rows=12, seconds=0.1, peak_memory_bytes=1, treated=self.treated)

    def close(self) -> None:
        self.closed = True


@dataclass
class Clock:
    """Time that passes when told; sleeping passes it. `wall_error`: how far this machine's clock is off."""

    seconds: float = 1000.0
    wall_error: float = 0.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        import time

        return time.time() + self.wall_error


class FakeWakeup(WakeupPipe):
    """Sleeps by moving the clock, where nothing really has to be waited for."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.slept: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.slept.append(seconds)
        self.clock.seconds += max(0.0, seconds)
        return super().wait(0.0)


@dataclass
class Daemon:
    agent: Agent
    executor: Executor
    training: FakeTraining
    clock: Clock
    wake: FakeWakeup
    reported: list[str]
    conditions: list[str]

    def ticks(self, until: Callable[[], bool], most: int = 200) -> None:
        for _ in range(most):
            if until():
                return
            self.agent.tick()
        assert until(), self.reported[-5:]


def enrolled(coordinator: FakeCoordinator, folder: Path, **options: Any) -> identity.Identity:
    State(folder).close()
    return identity.enrol(
        folder, coordinator.url, coordinator.token, name="a device", wait=lambda seconds: None, **options
    )


def daemon(folder: Path, sets: tuple[str, ...] = (), *, datasets: Mapping[str, int] | None = None) -> Daemon:
    """A daemon in `folder`, which is enrolled, begun but not going round by itself."""
    loaded = config.load(None, {"HOME": str(folder)}, [f"state_dir={folder}", *DATA, *sets]).config
    state = State(folder)
    training, clock, received, conditions = FakeTraining(), Clock(), [], []  # type: ignore[var-annotated]
    executor = Executor(loaded, state, Outbox(state, loaded.outbox_bytes), Ledger(state), training)
    host = HostEnvironment(
        ineligible=lambda: tuple(conditions),
        datasets=lambda: {"digits": 12} if datasets is None else datasets,
        runtimes={"litert": "2.3.0"},
        models=("cnn",),
        now=clock.now,
        wall=clock.wall,
        rng=random.Random(1),
        notify=received.append,
    )
    wake = FakeWakeup(clock)
    agent = Agent(executor, host, wake)
    agent.begin()
    return Daemon(agent, executor, training, clock, wake, received, conditions)
