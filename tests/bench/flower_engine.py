"""Fedloop's own engine beside Flower's Ray engine, on the same model and the same amount of data, in turns.

The app is `tests/support/flower_apps/mlp`, and the experiment that of `tests.bench.simulation`: 100 clients a round, 60 samples a client,
batches of 20, one epoch. A first result is that of the first round, from the start of the command. Memory is the proportional set size of all
processes. Needs ray, as `flower_app` does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from tests.bench import flower_app, simulation
from tests.bench.plain_loop import CLIENTS, WORKLOADS
from tests.support.processes import Marked

REPEATS, ROUNDS_OF_RAY = 5, 4
ENGINES = {"MLP 784-64-62": ("compiled", 30), "CNN, 62,006 params": ("compiled", 4)}
"""How our clients train, and how many times as fast as Ray's that is to be."""
FIRST_SECONDS, MEMORY_SHARE = 3.0, 0.25
_COMMAND = "import json, sys, fedloop; fedloop.simulate(json.loads(sys.argv[1]), out=sys.argv[2])"


def run() -> dict[str, Any]:
    """Of each model and engine: clients a second, seconds until the first result, and MB."""
    python = os.environ.get("FEDLOOP_BENCH_FLOWER", sys.executable)
    if subprocess.run([python, "-c", "import ray"], capture_output=True, check=False).returncode:
        print("flower_engine: skipped, there is no ray; see flower_app")
        return {}
    found: dict[str, Any] = {}
    failures: list[str] = []
    for name, (engine, times) in ENGINES.items():
        rows: dict[str, list[dict[str, float]]] = {"fedloop": [], "ray": []}
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as folder:
                config = {
                    "net": WORKLOADS[name].model,
                    "num-server-rounds": ROUNDS_OF_RAY,
                    "fraction-train": 1.0,
                    "fraction-evaluate": 0.0,
                    "out": f"{folder}/ray.npz",
                }
                command = flower_app.make_command("ray", python, config, Path(folder))
                rows["ray"].append(flower_app.measure(command, ROUNDS_OF_RAY))
                rows["fedloop"].append(_measure(name, engine, Path(folder) / "run"))
        found[name] = {who: flower_app.summarize(seen) for who, seen in rows.items()}
        ours, theirs = found[name]["fedloop"], found[name]["ray"]
        faster = ours["clients_per_second"] / theirs["clients_per_second"]
        memory = ours["peak_mb"] / theirs["peak_mb"]
        found[name] |= {"faster": faster, "memory": memory}
        for who in rows:
            print(f"flower_engine, {name}, {who}: {found[name][who]}", flush=True)
        print(f"flower_engine, {name}: {faster:.1f} times as fast, {memory:.2f} of the memory", flush=True)
        if faster < times:
            failures.append(f"{name}: {faster:.1f} times as fast as on Ray, promised are {times}")
        if ours["first_result_seconds"] > FIRST_SECONDS:
            failures.append(f"{name}: the first result took {ours['first_result_seconds']} s")
        if memory > MEMORY_SHARE:
            failures.append(f"{name}: {memory:.2f} of the memory, promised are {MEMORY_SHARE}")
    return {**found, "failures": failures}


def _measure(name: str, engine: str, out: Path) -> dict[str, float]:
    workload = WORKLOADS[name]
    document = simulation.make_experiment(workload, engine)
    warm_up, _ = simulation.ROUNDS[workload.model]
    marked = Marked(flower_app.MARK, uuid.uuid4().hex)
    began, first = time.monotonic(), None
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, json.dumps(document), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **marked.environment},
    )
    peak = flower_app.PeakMemory(lambda: flower_app.marked_pids(marked))
    peak.start()
    lines = out / "rounds.csv"
    while process.poll() is None:
        if first is None and lines.exists() and lines.read_bytes().count(b"\n") > 1:
            first = time.monotonic() - began
        time.sleep(0.02)
    assert process.returncode == 0 and first is not None
    report = json.loads((out / "report.json").read_text())
    seconds = [row["seconds"] for row in report["rounds"][warm_up:-1]]
    return {
        "clients_per_second": CLIENTS / statistics.mean(seconds),
        "first_result_seconds": first,
        "seconds": time.monotonic() - began,
        "peak_mb": peak.finish(),
    }
