"""Simulated rounds on a GPU: the engine "cuda" against a plain PyTorch loop over the clients on the same GPU.

    python -m tests.bench.gpu_simulation [--device cuda|cpu] [--rounds N] [--out FILE.json]

Both train the 100 clients of a workload (equal parts of the rows, batches of 20, one epoch), average and score every round. What is printed is
clients a second over warm rounds, and the time to the accuracy that the loop ends with, with and without the start of the
simulation: its processes, its data, what it compiles and records. It first shows that the engine is right: that a round ends where the
engine "pool" ends, and that one and two workers give the same bits. With `--device cpu` the engine is "auto", to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedloop
from models import zoo
from tests.bench.plain_loop import BATCH, CLIENTS, PlainLoop, Workload


@dataclass(frozen=True)
class Images(Workload):
    """A model of the catalog on images of a data set."""

    data: str = "digits"

    @property
    def dataset(self) -> str:
        return self.data

    def build(self) -> nn.Module:
        return zoo.get(self.model, input_shape=self.shape, classes=self.classes).build(7)


WORKLOADS = {
    "MLP 784-64-10, synthetic": Workload("mlp", (784,), 10, 24, (64,)),
    "cnn, digits": Images("cnn", (8, 8), 10, 24),
    "resnet8, digits": Images("resnet8", (8, 8), 10, 24),
    "cnn, MNIST-10k": Images("cnn", (28, 28), 10, 16, data="mnist"),
}
LR, WARM_UP, TOLERANCE = 0.2, 3, 1e-5


def run(device: str | None = None, rounds: int | None = None) -> dict[str, Any]:
    """Figures by workload; only that there is no GPU, where there is none and no device is given."""
    if device is None and not torch.cuda.is_available():
        print("gpu_simulation: not run, PyTorch finds no GPU here")
        return {"skipped": "no GPU"}
    device = device or "cuda"
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    for name, workload in WORKLOADS.items():
        if workload.dataset == "mnist" and "FEDLOOP_DATA_DIR" not in os.environ:
            continue
        sized = replace(workload, rounds=rounds or workload.rounds)
        found[name] = {"checks": _check(sized, device), **_measure(sized, device)}
        _print(name, found[name])
    return found


def _measure(workload: Workload, device: str) -> dict[str, Any]:
    loop = PlainLoop(workload, device, LR)
    seconds, accuracies = [], []
    for _ in range(workload.rounds):
        began = time.perf_counter()
        loop.train_round()
        accuracies.append(loop.accuracy())  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    target = accuracies[-1]
    reached = next(number for number, accuracy in enumerate(accuracies) if accuracy >= target)
    began = time.perf_counter()
    rows = _simulate(workload, _engine(device), rounds=2 * workload.rounds)["report"]["rounds"]
    whole = time.perf_counter() - began
    ours = [row["seconds"] for row in rows]
    ours_reached = next((at for at, row in enumerate(rows) if row["test_accuracy"] >= target), None)
    assert ours_reached is not None, f"{target} was not reached: {[row['test_accuracy'] for row in rows]}"
    start = whole - sum(ours)
    return {
        "accuracy": target,
        "loop": {
            "clients_per_second": CLIENTS / statistics.median(seconds[WARM_UP:]),
            "rounds": reached + 1,
            "seconds": sum(seconds[: reached + 1]),
        },
        "simulation": {
            "clients_per_second": CLIENTS / statistics.median(ours[WARM_UP:]),
            "rounds": ours_reached + 1,
            "seconds": sum(ours[: ours_reached + 1]),
            "start_seconds": start,
            "first_round_seconds": ours[0],
        },
    }


def _check(workload: Workload, device: str) -> dict[str, Any]:
    """Largest difference of a weight after a round from the engine "pool"; whether two workers give one worker's bits."""
    pool = _simulate(workload, "pool", rounds=1)["params"]
    ours = _simulate(workload, _engine(device), rounds=1)["params"]
    difference = max(float(np.abs(pool[name] - ours[name]).max()) for name in pool)
    assert difference <= TOLERANCE, f"a weight differs by {difference} after a round"
    one, two = (
        _simulate(workload, _engine(device), rounds=2, clients=600, workers=workers)["report"]["final"][
            "model_sha256"
        ]
        for workers in (1, 2)
    )
    assert one == two, f"one worker gives {one}, two give {two}"
    return {"largest_difference": difference, "model_sha256": one}


def _engine(device: str) -> str:
    return "cuda" if device == "cuda" else "auto"


def _simulate(
    workload: Workload, engine: str, *, rounds: int, clients: int = CLIENTS, workers: int = 1
) -> dict[str, Any]:
    model: dict[str, Any] = {"name": workload.model}
    if workload.hidden:
        model["hidden"] = list(workload.hidden)
    experiment = {
        "data": {"dataset": workload.dataset, "partition": "iid"},
        "model": model,
        "federation": {
            "clients": clients,
            "clients_per_round": clients,
            "rounds": rounds,
            "runtimes": {"torch": 1.0},
        },
        "local": {"epochs": 1, "batch_size": BATCH, "lr": LR},
        "simulation": {"workers": workers, "engine": engine, "local_baseline": "off"},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = fedloop.simulate(
            experiment, out=Path(folder) / "run", data_dir=os.environ.get("FEDLOOP_DATA_DIR")
        )
        return {"report": result.report, "params": result.params}


def _print(name: str, found: dict[str, Any]) -> None:
    loop, ours = found["loop"], found["simulation"]
    print(
        f"gpu_simulation, {name}: {ours['clients_per_second']:.0f} clients/s, plain loop on the same device "
        f"{loop['clients_per_second']:.0f} ({ours['clients_per_second'] / loop['clients_per_second']:.1f} times); to "
        f"{100 * found['accuracy']:.1f} % accuracy {ours['seconds']:.2f} s and {ours['start_seconds']:.1f} s of start, loop "
        f"{loop['seconds']:.2f} s; after a round within {found['checks']['largest_difference']:.1e} of the engine pool, one and two workers alike",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_simulation", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, help="of the loop")
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    chosen = parser.parse_args()
    figures = run(chosen.device, chosen.rounds)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(figures, indent=2))
