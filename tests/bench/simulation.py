"""Rounds of a simulation against a plain loop that trains the same clients one after the other.

Both do the same SGD on the same rows; the loop has no fleet, no messages, no checks, no commits. The limit for n workers
is n times the loop, less the evaluation and commit that only the simulation does.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedloop
from edge_client.data.examples import Examples
from edge_client.train.torch_trainer import TorchRuntime, read
from edge_client.train.trainer import Trainer, TrainTask
from models import datasets, zoo
from tests.bench.interleaved import medians

CLIENTS, ROUNDS, EPOCHS, BATCH, REPEATS = 20, 10, 5, 16, 3


def run() -> dict[str, Any]:
    """Clients trained per second, for torch and LiteRT clients with one and with all cores."""
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    ways = {"plain loop": _plain_loop()}
    for runtime in ("torch", "litert"):
        for workers in sorted({1, cores}):
            ways[f"{runtime}, {workers} workers"] = _simulated(runtime, workers)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    medians({name: _recorded(way, spent[name]) for name, way in ways.items()}, REPEATS)
    # A simulation reports the seconds of its rounds, without start-up; the loop has none.
    rate = {name: CLIENTS * ROUNDS / float(np.median(values[1:])) for name, values in spent.items()}
    for name, value in rate.items():
        print(
            f"simulation, {name}: {value:.0f} clients/s, {value / rate['plain loop']:.2f} of the plain loop"
        )
    return {"clients_per_second": rate, "of_plain_loop": {n: v / rate["plain loop"] for n, v in rate.items()}}


def _recorded(way: Any, values: list[float]) -> Any:
    return lambda: values.append(way())


def _simulated(runtime: str, workers: int) -> Any:
    experiment = {
        "data": {"partition": "iid"},
        "federation": {
            "clients": CLIENTS,
            "clients_per_round": CLIENTS,
            "rounds": ROUNDS,
            "runtimes": {runtime: 1.0},
        },
        "local": {"epochs": EPOCHS, "batch_size": BATCH},
        "simulation": {"workers": workers},
    }

    def rounds() -> float:
        with tempfile.TemporaryDirectory() as folder:
            result = fedloop.simulate(experiment, out=Path(folder) / "run")
        # The first round also loads the runtimes.
        return float(sum(row["seconds"] for row in result.rounds[1:])) * ROUNDS / (ROUNDS - 1)

    return rounds


def _plain_loop() -> Any:
    import time

    data = datasets.load("digits", seed=7)
    parts = datasets.partition("iid", data, clients=CLIENTS, seed=7)
    local = [Examples(data.x[part], data.y[part]) for part in parts]
    spec = zoo.get("cnn", input_shape=(8, 8), classes=10)
    module = spec.build(7)
    params, trainer = read(module), Trainer(TorchRuntime(module, spec.loss))

    def rounds() -> float:
        began = time.perf_counter()
        for number in range(ROUNDS):
            for examples in local:
                trainer.train(params, TrainTask(number, BATCH, 0.05, epochs=EPOCHS), examples)
        return time.perf_counter() - began

    return rounds
