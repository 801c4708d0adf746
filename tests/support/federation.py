"""A federation without a framework: a tiny model, its tasks, and updates of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from coordinator.rounds.closing import Closing
from coordinator.rounds.plan import LocalWork, RunPlan, Task
from edge_client.train import schedule
from edge_client.wire.device import TaskMessage
from strategies import presets
from strategies.params import Params
from strategies.update import Update

PARAMS: Params = {
    "frozen": np.array([7.0], np.float32),
    "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
}
BASE = "ab" * 32


def run_plan(strategy: str = "fedavg", **changed: Any) -> RunPlan:
    """A plan for `PARAMS`; `changed` are attributes of the plan or of its closing, such as `rounds`."""
    attributes: dict[str, Any] = {
        "seed": 7,
        "rounds": 3,
        "strategy": presets.get(strategy),
        "local": LocalWork(batch_size=4, lr=0.1, epochs=1, steps=None),
        "trainable": ("w",),
    }
    closing = Closing(changed.pop("clients_per_round", 3), changed.pop("deadline_seconds", 600.0))
    return RunPlan(**attributes | {"closing": closing} | changed)


def task(client: str = "site-a", *, round_number: int = 3, position: int = 0) -> Task:
    message = TaskMessage(round_number, client, BASE, 5, 4, 0.1, 1, None, {"name": "plain"})
    return Task(position, message)


def steps_of(task: TaskMessage, num_examples: int) -> int:
    """The steps that a client with so many examples reports."""
    return schedule.count(num_examples, task.batch_size, epochs=task.epochs, steps=task.steps)


def update(like: Params, *, seed: int = 0, num_examples: int = 10) -> Update:
    """Normal deltas shaped as `like`, as after the one epoch that `task` asks for."""
    rng = np.random.default_rng(seed)
    delta = {name: rng.normal(0, 0.1, value.shape).astype(np.float32) for name, value in like.items()}
    return Update(delta, num_examples, num_steps=-(-num_examples // 4), train_loss=float(rng.uniform(0.1, 2)))
