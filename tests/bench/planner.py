"""The planner's choice against the best of all plans on 4 processes, every one of them trained and timed.

All plans that the planner ranks take turns, those for the same number of processes in the same processes, so that a busy machine slows
all of them alike; medians over turns. Also its predictions beside what was measured, of seconds and of bytes. FEDLOOP_BENCH_PLANS limits how many plans
are measured, the first of the ranking first, and then says less.

Memory of a covering set of plans, each in processes of its own: resident memory, as the planner predicts it. And the seconds and the memory
of planning for a gpt of 98 million params without measuring.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_client.processes import process
from models.pretrain import plan as plans
from models.pretrain import world
from models.pretrain.planner import __main__ as planner
from models.pretrain.planner import memory
from models.pretrain.planner.bench_rank import Worlds, measure_plans
from models.pretrain.training import TrainingOptions
from models.zoo import ModelSpec, gpt
from tests.models.pretrain import planned_memory
from tests.models.pretrain.planned_memory import peak
from tests.support import ranks

PROCESSES, BATCH, TURNS = 4, 16, 3
LENGTH, VOCAB, WIDTH, LAYERS, HEADS = 64, 256, 128, 4, 4
AIM, MEMORY_AIM = 1.10, 0.15
SHOWN = 20
MEMORY_BATCH, LARGE_AIM = 8, 60
COVERING = (
    "dp=1",
    "dp=2",
    "dp=2,microbatches=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=4,zero=3",
    "dp=2,activation_checkpoint=full",
    "dp=2,activation_checkpoint=selective",
    "tp=2",
    "tp=2,sequence=true,loss_parallel=true",
    "cp=2",
    "pp=2,schedule=gpipe,microbatches=4",
    "pp=2,schedule=1f1b,microbatches=4",
    "pp=2,schedule=interleaved,microbatches=4",
    "pp=2,schedule=zero-bubble,microbatches=4",
    "dp=2,pp=2,microbatches=2",
    "dp=2,tp=2,zero=2",
)
LARGE = {
    "name": "gpt",
    "options": {"width": 768, "layers": 12, "heads": 12},
    "input_shape": [256],
    "classes": 8192,
    "input_dtype": "int32",
    "task": "next_token",
}


def run() -> dict[str, Any]:
    """Seconds a step and bytes of every plan, predicted and measured, and how far the choice is from the best."""
    found = _planned()
    ranking = found["ranking"][: int(os.environ.get("FEDLOOP_BENCH_PLANS", "0")) or None]
    texts = [row["plan"] for row in ranking]
    seconds = _seconds(texts)
    most = _memory(texts)
    table = {
        row["plan"]: {
            "predicted": row["predicted"],
            "corrected": row["seconds"],
            "measured": seconds[row["plan"]],
            "memory predicted": sum(
                row["memory"][part] for part in row["memory"] if part not in ("process", "allocator")
            ),
            "memory measured": most[row["plan"]],
        }
        for row in ranking
    }
    return {**_report(found, table), "resident": _resident(), "large": _large()}


def _seconds(texts: Sequence[str]) -> dict[str, float]:
    """Median seconds of a step by plan, over turns that all plans take."""
    steps: dict[str, list[float]] = {text: [] for text in texts}
    for _ in range(TURNS):
        for processes, alike in _by_processes(texts).items():
            for text, took in ranks.run(processes, f"{__name__}:timed", alike)[0].items():
                steps[text] += took
    return {text: statistics.median(took) for text, took in steps.items()}


def _memory(texts: Sequence[str]) -> dict[str, int]:
    """The most bytes that were alive in any process, by plan."""
    most: dict[str, int] = {}
    for processes, alike in _by_processes(texts).items():
        found = ranks.run(processes, f"{__name__}:weighed", alike)
        most |= {text: max(of[text] for of in found) for text in alike}
    return most


def _resident() -> dict[str, dict[str, float]]:
    """Predicted and measured resident memory of the process that needs most, by plan."""
    table = {}
    for text in COVERING:
        plan = plans.parse(text)
        target = "tests.models.pretrain.planned_memory:resident"
        found = ranks.run(plan.processes, target, text, MEMORY_BATCH, **planned_memory.MEDIUM)
        before, most = (max(each) for each in zip(*found, strict=True))
        profile = planned_memory.profile(before, **planned_memory.MEDIUM)
        predicted = memory.peak(plan, profile, MEMORY_BATCH)
        table[text] = {"measured": most, "before": before, "predicted": predicted.bytes}
        print(
            f"  {text}: {most / 2**20:.0f} MiB resident, predicted {predicted.bytes / 2**20:.0f} "
            f"({predicted.bytes / most - 1:+.1%}); above what a process takes alone {(most - before) / 2**20:.0f}, predicted "
            f"{(predicted.bytes - before) / 2**20:.0f}"
        )
    worst = max(table, key=lambda text: abs(table[text]["predicted"] / table[text]["measured"] - 1))
    off = table[worst]["predicted"] / table[worst]["measured"] - 1
    print(
        f"planner: resident memory predicted / measured - 1 at worst {off:+.1%}, {worst} (aim {MEMORY_AIM:.0%})"
    )
    return table


def _large() -> dict[str, float]:
    """Seconds of planning for a large model without measuring, and the memory of the planner's process."""
    job = {**_job(), "model": LARGE, "options": {"batch_size": 8, "steps": 10}}
    job["planner"] = {"processes": PROCESSES, "measure": 0, "cache": False}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, "-P", "-m", "models.pretrain.planner", str(path)]
        began = time.perf_counter()
        with subprocess.Popen(
            command, env=process.worker_environment(), stdout=subprocess.DEVNULL
        ) as planning:
            _, status, used = os.wait4(planning.pid, 0)
            planning.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        found = json.loads((Path(folder) / "result.json").read_text())
    peak = used.ru_maxrss * 1024
    print(
        f"planner: {found['ranking'][0]['plan']} for 98 million params after {seconds:.1f} s (aim <= {LARGE_AIM}), "
        f"{used.ru_utime + used.ru_stime:.1f} processor seconds with its workers, {peak / 2**20:.0f} MiB; {found['phases']}"
    )
    return {"seconds": seconds, "processor seconds": used.ru_utime + used.ru_stime, "bytes": peak}


def _by_processes(texts: Sequence[str]) -> dict[int, list[str]]:
    """Plans by their number of processes: the planner ranks plans for fewer where they are predicted faster."""
    grouped: dict[int, list[str]] = {}
    for text in texts:
        grouped.setdefault(plans.parse(text).processes, []).append(text)
    return grouped


def timed(texts: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of every step of one turn, by plan. Runs in the ranks."""
    with world.join(plans.parse(texts[0])) as here:
        steps = measure_plans(
            texts, _spec(), TrainingOptions(steps=10, batch_size=BATCH), Worlds(here.device), turns=1
        )
    return {text: [took for took, _ in of] for text, of in steps.items()}


def weighed(texts: Sequence[str]) -> dict[str, int]:
    """The most bytes that were alive, by plan. Runs in the ranks."""
    with world.join(plans.parse(texts[0])) as here:
        worlds = Worlds(here.device)
        return {text: peak(worlds.of(plans.parse(text)), _spec(), BATCH)[1] for text in texts}


def _report(found: dict[str, Any], table: dict[str, dict[str, float]]) -> dict[str, Any]:
    chosen, best = next(iter(table)), min(table, key=lambda text: table[text]["measured"])
    pure = min(table, key=lambda text: table[text]["predicted"])
    print(f"planner: {len(table)} of {len(found['ranking'])} plans measured on {PROCESSES} processes")
    for text in sorted(table, key=lambda text: table[text]["measured"])[:SHOWN]:
        row = table[text]
        print(
            f"  {text}: {row['measured'] * 1e3:.1f} ms, predicted {row['predicted'] * 1e3:.1f}; "
            f"{row['memory measured'] / 2**20:.1f} MiB, predicted {row['memory predicted'] / 2**20:.1f}"
        )
    ratio = table[chosen]["measured"] / table[best]["measured"]
    unverified = table[pure]["measured"] / table[best]["measured"]
    error = statistics.median(abs(row["predicted"] / row["measured"] - 1) for row in table.values())
    off = {text: row["memory predicted"] / row["memory measured"] - 1 for text, row in table.items()}
    worst = max(off, key=lambda text: abs(off[text]))
    print(f"planner: chose {chosen}, best is {best}; chosen / best {ratio:.2f} (aim <= {AIM})")
    print(f"planner: best predicted is {pure}, without measuring {unverified:.2f}; median error {error:.0%}")
    print(
        f"planner: memory predicted / measured - 1 at worst {off[worst]:+.0%}, {worst} (aim {MEMORY_AIM:.0%})"
    )
    return {
        "chosen": chosen,
        "best": best,
        "chosen / best": ratio,
        "best predicted / best": unverified,
        "median error of seconds": error,
        "worst error of memory": off[worst],
        "plans measured": len(table),
        "plans that fit": len(found["ranking"]),
        "plans": table,
    }


def _job() -> dict[str, Any]:
    return {
        "model": {
            "name": "gpt",
            "options": {"width": WIDTH, "layers": LAYERS, "heads": HEADS},
            "input_shape": [LENGTH],
            "classes": VOCAB,
            "input_dtype": "int32",
            "task": "next_token",
        },
        "options": {"batch_size": BATCH, "steps": 10},
        "plan": {"activation_checkpoint": "none"},
        "planner": {"processes": PROCESSES},
    }


def _planned() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(_job()))
        planner.plan(path, lambda **fields: None)
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return found


def _spec() -> ModelSpec:
    return gpt.spec((LENGTH,), VOCAB, width=WIDTH, layers=LAYERS, heads=HEADS)
