"""Warm rounds of a simulation against a plain PyTorch loop on one core, and two such loops side by side.

All train 100 clients a round with 60 rows each in batches of 20, one epoch. The loop averages and does nothing else; the
simulation also checks, records and commits its rounds, on two workers. Neither scores the model. Measured in turns.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import fedloop
from tests.bench.plain_loop import (
    BATCH,
    CLIENTS,
    LR,
    WORKLOADS,
    Workload,
    count_operations,
    measure_operations,
    measure_rate,
)

REPEATS, WORKERS = 5, 2
ENGINES = ("auto", "compiled")
ROUNDS = {"mlp": (5, 50), "cnn": (2, 4), "logreg": (20, 240)}
"""Rounds of a simulation, of each model: of the warm-up, and measured, which take about a second."""


def run() -> dict[str, Any]:
    """Clients a second by workload and way: median and spread, and its ratio to the loops of the same turn."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as first, ProcessPoolExecutor(1, spawn) as second:
        return {name: _measure(name, (first, second)) for name in WORKLOADS}


def _measure(name: str, cores: tuple[ProcessPoolExecutor, ProcessPoolExecutor]) -> dict[str, Any]:
    workload = WORKLOADS[name]
    operations, limit = count_operations(name), WORKERS * cores[0].submit(measure_operations).result()
    ways: dict[str, Callable[[], float]] = {
        "one loop": lambda: cores[0].submit(measure_rate, name).result(),
        "two loops": lambda: _sum([each.submit(measure_rate, name) for each in cores]),
    }
    for engine in ENGINES:
        ways[engine] = lambda engine=engine: _simulate(workload, engine)  # type: ignore[misc]
    ways["two loops"]()  # both load their data
    rates: dict[str, list[float]] = {way: [] for way in ways}
    loads = [os.getloadavg()[0]]
    for _ in range(REPEATS):
        for way, measure in ways.items():
            rates[way].append(measure())
        loads.append(os.getloadavg()[0])
    found: dict[str, Any] = {"load": loads}
    for way, values in rates.items():
        found[way] = {"clients_per_second": _spread(values)}
        for loops in ("one loop", "two loops"):
            ratios = [value / loop for value, loop in zip(values, rates[loops], strict=True)]
            found[way][f"times_{loops.replace(' ', '_')}"] = _spread(ratios)
        figures = found[way]
        share = figures["clients_per_second"]["median"] * operations / limit
        figures["share_of_products"] = share
        print(
            f"simulation, {name}, {way}: {figures['clients_per_second']['median']:.0f} clients/s, "
            f"{figures['times_one_loop']['median']:.2f} times the loop on one core "
            f"({figures['times_one_loop']['low']:.2f} to {figures['times_one_loop']['high']:.2f}), "
            f"{figures['times_two_loops']['median']:.2f} of two loops side by side, "
            f"{100 * share:.1f} % of the operations a second of large matrix products on {WORKERS} cores",
            flush=True,
        )
    return found


def _sum(rates: list[Future[float]]) -> float:
    return sum(each.result() for each in rates)


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def make_experiment(workload: Workload, engine: str) -> dict[str, Any]:
    """The experiment that is measured. Only its last round scores the model."""
    model: dict[str, Any] = {"name": workload.model}
    if workload.model == "cnn":
        model = {"name": "tests.bench.plain_loop:build_cnn"}
    elif workload.hidden:
        model["hidden"] = list(workload.hidden)
    rounds = sum(ROUNDS[workload.model]) + 1
    return {
        "data": {"dataset": workload.dataset, "partition": "iid"},
        "model": model,
        "federation": {
            "clients": CLIENTS,
            "clients_per_round": CLIENTS,
            "rounds": rounds,
            "runtimes": {"torch": 1.0},
        },
        "local": {"epochs": 1, "batch_size": BATCH, "lr": LR},
        "evaluation": {"every": rounds},
        "simulation": {"workers": WORKERS, "engine": engine, "local_baseline": "off"},
    }


def _simulate(workload: Workload, engine: str) -> float:
    """Clients a second over the rounds after the warm-up, which loads the runtimes."""
    with tempfile.TemporaryDirectory() as folder:
        rows = fedloop.simulate(make_experiment(workload, engine), out=Path(folder) / "run").report["rounds"]
    assert all(row["accepted"] == CLIENTS for row in rows), json.dumps(rows)
    warm = [row["seconds"] for row in rows[ROUNDS[workload.model][0] : -1]]
    return CLIENTS * len(warm) / float(sum(warm))
