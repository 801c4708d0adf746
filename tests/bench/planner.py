"""The planner's choice against the best of all plans on 4 processes, every one of them trained and timed.

Plans take turns, so that a busy machine slows all of them alike; medians over turns. Also its predictions beside what was
measured. FEDLOOP_BENCH_PLANS limits how many plans are measured, the best predicted first, and then says less.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.planner import __main__ as planner
from models.pretrain.planner.ranks import examples
from models.pretrain.training import Options
from models.zoo import gpt
from tests.support import ranks

PROCESSES, BATCH, TURNS, STEPS = 4, 16, 3, 3
LENGTH, VOCAB, WIDTH, LAYERS, HEADS = 64, 256, 128, 4, 4
AIM = 1.10


def run() -> dict[str, Any]:
    """Seconds a step, predicted and measured, of every plan, and how far the choice is from the best."""
    found = _planned()
    limit = int(os.environ.get("FEDLOOP_BENCH_PLANS", "0"))
    ranking = found["ranking"][: limit or None]
    measured = _measured([row["plan"] for row in ranking])
    best = min(measured, key=lambda text: measured[text])
    chosen = ranking[0]["plan"]
    print(f"planner: {len(ranking)} of {len(found['ranking'])} plans measured on {PROCESSES} processes")
    for row in ranking[:20]:
        took = measured[row["plan"]]
        print(f"  {row['plan']}: predicted {row['seconds'] * 1e3:.1f} ms, measured {took * 1e3:.1f} ms")
    ratio = measured[chosen] / measured[best]
    print(f"planner: chose {chosen}, best is {best}; chosen / best {ratio:.2f} (aim <= {AIM})")
    return {
        "chosen": chosen,
        "best": best,
        "chosen / best": ratio,
        "plans measured": len(ranking),
        "plans that fit": len(found["ranking"]),
        "seconds": {
            row["plan"]: {"predicted": row["seconds"], "measured": measured[row["plan"]]} for row in ranking
        },
    }


def timed(text: str) -> list[float]:
    """Seconds of each of `STEPS` steps by a plan. Runs in the ranks."""
    spec = gpt.spec((LENGTH,), VOCAB, width=WIDTH, layers=LAYERS, heads=HEADS)
    options = Options(steps=STEPS + 1, batch_size=BATCH)
    with world.join(plans.parse(text)) as here:
        training = trainer.build(spec, examples(spec, 2 * BATCH), options, here, 0)
        training.train_step()
        seconds = []
        for _ in range(STEPS):
            dist.barrier()
            began = time.perf_counter()
            training.train_step()
            took = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds.append(float(took))
    return seconds


def _measured(texts: list[str]) -> dict[str, float]:
    """Median seconds of a step by plan, each in a world of its own every turn."""
    seconds: dict[str, list[float]] = {text: [] for text in texts}
    for _ in range(TURNS):
        for text in texts:
            seconds[text] += ranks.run(PROCESSES, "tests.bench.planner:timed", text)[0]
    return {text: statistics.median(values) for text, values in seconds.items()}


def _planned() -> dict[str, Any]:
    job = {
        "model": {
            "name": "gpt",
            "options": {"width": WIDTH, "layers": LAYERS, "heads": HEADS},
            "input_shape": [LENGTH],
            "classes": VOCAB,
            "input_dtype": "int32",
            "task": "next_token",
        },
        "options": {"batch_size": BATCH, "steps": 10},
        "plan": {"recompute": "none"},
        "planner": {"processes": PROCESSES},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        planner.plan(path, lambda **fields: None)
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return found
