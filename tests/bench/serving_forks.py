"""CPU seconds until a worker has opened a model: forked from a process that has imported PyTorch, and started anew."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from edge_client.processes.process import worker_environment
from tests.support.serving import serving, torch_model

_FRESH = """
import json, sys
import models.zoo, models.compress.pruning.structure, models.job
from models.serving.opening import open_model
open_model(json.loads(sys.argv[1]), "torch", 1)
"""
REPEATS = 5


def forks(folder: Path) -> dict[str, float]:
    """Of a worker for `mlp`, the medians of `REPEATS` in turns."""
    path = torch_model(folder / "forked", "mlp")
    description = json.loads((path / "model.json").read_text())
    model = {"folder": str(path), "release": False, "params": str(path / "model.safetensors")}
    fresh, forked = [], []
    with serving(folder / "forks-home") as server:
        server.deployed("first", path)  # the process that forks has imported everything
        for number in range(REPEATS):
            fresh.append(_fresh_seconds({**model, "description": description}))
            status = server.deployed(f"more-{number}", path)
            forked.append(_cpu_seconds(status["pids"][0]))
    found = {
        "fresh worker: CPU s": statistics.median(fresh),
        "forked worker: CPU s": statistics.median(forked),
    }
    return {**found, "forked / fresh worker": found["forked worker: CPU s"] / found["fresh worker: CPU s"]}


def _fresh_seconds(model: dict[str, object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-P", "-c", _FRESH, json.dumps(model)], check=True, env=worker_environment()
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
