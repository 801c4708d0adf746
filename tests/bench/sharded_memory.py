"""Peak memory of one process of a sharded pretraining, beside its share of the training's state and one layer.

Each case is a real `launch` that trains, saves, scores and writes a model; then again with RLIMIT_DATA at what was
measured and some slack, resumed from its checkpoint. Memory is what that limit counts, heap and private writable
mappings (VmData), and what was resident (VmHWM), both less those of a tiny model under the same plan. A share is 16 bytes
(params, gradients, two moments) of each param, divided by the processes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.pretraining import change, training, write_job

WIDTH, LAYERS, STEPS = 384, 16, 4
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"dp": 4, "zero": 3},
    {"tp": 4},
    {"pp": 4, "microbatches": 4},
)
MIB = 2**20
LAYER_BYTES = 4 * 12 * WIDTH**2
_INTERVAL_SECONDS = 0.005
_FEW_THREADS = {
    "MALLOC_MMAP_THRESHOLD_": "131072",  # freed memory is given back
    "MALLOC_ARENA_MAX": "1",
}


def run() -> dict[str, float]:
    """MiB by case."""
    figures: dict[str, float] = {}
    os.environ |= _FEW_THREADS
    losses: list[float] = []
    for plan in PLANS:
        name = ",".join(f"{key}={value}" for key, value in plan.items()) or "one process"
        processes = plan.get("dp", 1) * plan.get("tp", 1) * plan.get("pp", 1)
        with tempfile.TemporaryDirectory() as folder:
            tiny, _ = measured(Path(folder) / "tiny", plan, processes, 32)
            job = Path(folder) / "model"
            whole, result = measured(job, plan, processes, WIDTH)
            allowed = whole["private"] + 4 * LAYER_BYTES
            change(job / "job.json", options=_options(2 * STEPS))
            _, resumed = measured(job, plan, processes, WIDTH, int(allowed))
        losses = losses or resumed["losses"]
        difference = max(abs(a - b) for a, b in zip(losses, resumed["losses"], strict=True))
        share = 16 * result["parameters"] / processes
        private, held = whole["private"] - tiny["private"], whole["resident"] - tiny["resident"]
        print(
            f"{name}: params {4 * result['parameters'] / MIB:.0f} MiB, a share {share / MIB:.0f}, a layer "
            f"{LAYER_BYTES / MIB:.0f}; peak {private / MIB:.0f} private, {held / MIB:.0f} resident: the share and "
            f"{(private - share) / LAYER_BYTES:.1f} layers; resumed under RLIMIT_DATA, losses of one process within "
            f"{difference:.1e}"
        )
        figures |= {
            f"{name}: share MiB": share / MIB,
            f"{name}: peak private MiB": private / MIB,
            f"{name}: peak resident MiB": held / MIB,
            f"{name}: largest difference of a loss": difference,
        }
    return figures


def measured(
    folder: Path, plan: Mapping[str, Any], processes: int, width: int, limit: int = 0
) -> tuple[dict[str, int], dict[str, Any]]:
    """Largest private and resident bytes of a process of a training, and its result; goes on where `folder` has one."""
    job = folder / "job.json"
    if not job.exists():
        write_job(folder, STEPS, every=STEPS, plan=plan)
        model = json.loads(job.read_text())["model"]
        change(job, model={**model, "options": {"width": width, "layers": LAYERS, "heads": 4}})
        change(job, options=_options(STEPS))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    stack = resource.getrlimit(resource.RLIMIT_STACK)
    peak = {"private": 0, "resident": 0}
    try:
        resource.setrlimit(resource.RLIMIT_STACK, (MIB, stack[1]))  # of threads
        resource.setrlimit(resource.RLIMIT_DATA, (limit or before[0], before[1]))
        with training(job, processes) as agent:
            resource.setrlimit(resource.RLIMIT_DATA, before)
            while agent.process.poll() is None:
                for worker in agent.workers:
                    for key, field in (("private", "VmData"), ("resident", "VmHWM")):
                        peak[key] = max(peak[key], _bytes(worker, field))
                time.sleep(_INTERVAL_SECONDS)
            if agent.ended():
                raise RuntimeError(f"{plan} ended with {agent.process.returncode}: {agent.lines[-1:]}")
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        resource.setrlimit(resource.RLIMIT_STACK, stack)
    return peak, json.loads((folder / "result.json").read_text())


def _options(steps: int) -> dict[str, Any]:
    return {"steps": steps, "batch_size": 8, "lr": 1e-3, "eps": 1e-6}


def _bytes(process: int, field: str) -> int:
    try:
        found = re.search(
            rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE
        )
    except OSError:  # it has ended
        return 0
    return int(found[1]) * 1024 if found else 0
