"""An unmodified Flower app on our grid and on Flower's Ray engine, in turns: clients a second, and the same weights.

The app is `tests/support/flower_apps/mlp`: 60 samples a client, batches of 20, one epoch, 784-64-62. Needs ray in this environment, or in that of the
Python which FEDLOOP_BENCH_FLOWER names. A round ends where the next begins, as the log says; the first is left out as a warm-up.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.population import pss_mb
from tests.support.processes import Marked, pids, read_proc

_APP = Path(__file__).parents[1] / "support" / "flower_apps" / "mlp"
_CLIENTS, _ROUNDS, _REPEATS = 100, 8, 5
_FASTER = 5.0
MARK = "FEDLOOP_BENCH_RUN"
_TICKS = os.sysconf("SC_CLK_TCK")
_WATCH_SECONDS = 0.25


def run() -> dict[str, Any]:
    """Per engine: clients a second in warm rounds, CPU milliseconds a client over all processes, seconds to the first result."""
    python = os.environ.get("FEDLOOP_BENCH_FLOWER", sys.executable)
    if subprocess.run([python, "-c", "import ray"], capture_output=True, check=False).returncode:
        print(
            "flower_app: skipped, there is no ray; FEDLOOP_BENCH_FLOWER may name a Python with flwr[simulation] and torch"
        )
        return {}
    rows: dict[str, list[dict[str, float]]] = {"fedloop": [], "ray": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for turn in range(_REPEATS):
            for engine, seen in rows.items():
                config = {
                    "num-server-rounds": _ROUNDS,
                    "fraction-train": 1.0,
                    "fraction-evaluate": 0.0,
                    "out": f"{folder}/{engine}.npz",
                }
                seen.append(measure(make_command(engine, python, config, folder / f"{engine}-{turn}")))
        with np.load(folder / "fedloop.npz") as ours, np.load(folder / "ray.npz") as theirs:
            difference = max(float(np.abs(ours[key] - theirs[key]).max()) for key in theirs)
    found: dict[str, Any] = {engine: summarize(seen) for engine, seen in rows.items()}
    found |= {
        "faster": round(found["fedloop"]["clients_per_second"] / found["ray"]["clients_per_second"], 2),
        "difference": difference,
    }
    for engine in rows:
        print(f"flower_app: {engine:8} {found[engine]}")
    print(f"flower_app: {found['faster']} times as fast, weights differ by {difference:.1e}")
    missed = (
        []
        if found["faster"] >= _FASTER
        else [f"{found['faster']} times as fast as on Ray, promised are {_FASTER}"]
    )
    if difference > 1e-5:
        missed.append(f"weights differ by {difference}")
    return {**found, "failures": missed}


def make_command(engine: str, python: str, config: dict[str, Any], out: Path) -> list[str]:
    if engine == "ray":
        return [
            python,
            "-P",
            str(Path(__file__).with_name("flower_ray.py")),
            str(_APP),
            str(_CLIENTS),
            json.dumps(config),
        ]
    pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    fedloop = str(Path(sys.executable).with_name("fedloop"))
    return [
        fedloop,
        "simulate",
        "--flower-app",
        str(_APP),
        "--set",
        f"federation.clients={_CLIENTS}",
        "--run-config",
        pairs,
        "--out",
        str(out),
    ]


def measure(command: Sequence[str], rounds_wanted: int = _ROUNDS) -> dict[str, float]:
    """Figures of one run of the app, which takes so many rounds."""
    marked = Marked(MARK, uuid.uuid4().hex)
    began, first = time.monotonic(), None
    rounds: list[tuple[float, float]] = []
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **marked.environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    peak = PeakMemory(lambda: marked_pids(marked))
    peak.start()
    for line in process.stderr:
        if re.search(r"\[ROUND \d", line) or "Strategy execution finished" in line:
            rounds.append((time.monotonic(), _cpu_seconds(marked)))
        elif "aggregate_train: Received" in line and first is None:
            first = time.monotonic() - began
    assert process.wait() == 0 and first is not None and len(rounds) == rounds_wanted + 1
    seconds = [later[0] - before[0] for before, later in pairwise(rounds[1:])]
    return {
        "clients_per_second": _CLIENTS / statistics.median(seconds),
        "cpu_ms_per_client": 1000 * (rounds[-1][1] - rounds[1][1]) / (_CLIENTS * (rounds_wanted - 1)),
        "first_result_seconds": first,
        "seconds": time.monotonic() - began,
        "peak_mb": peak.finish(),
    }


def marked_pids(marked: Marked) -> list[int]:
    """The processes of a run that live."""
    return [pid for pid in pids() if f"{marked.variable}={marked.value}\0" in read_proc(pid, "environ")]


def _cpu_seconds(marked: Marked) -> float:
    """Of all processes of a run that live."""
    ticks = 0
    for pid in marked_pids(marked):
        fields = read_proc(pid, "stat").rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:13]))
    return ticks / _TICKS


class PeakMemory(threading.Thread):
    """Watches the proportional set size of processes."""

    def __init__(self, find: Callable[[], list[int]]) -> None:
        super().__init__(daemon=True)
        self._find = find
        self._ended = threading.Event()
        self._peak = 0.0

    def run(self) -> None:
        while not self._ended.wait(_WATCH_SECONDS):
            self._peak = max(self._peak, sum(map(pss_mb, self._find())))

    def finish(self) -> float:
        """The most that they had together, in MB."""
        self._ended.set()
        self.join()
        return self._peak


def summarize(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians, and of the speeds the spread."""
    speeds = [round(row["clients_per_second"], 1) for row in rows]
    return {
        **{key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]},
        "spread": [min(speeds), max(speeds)],
    }
