"""Runs the benchmarks and writes `runs/bench/<time>.json`; `--only NAME`, which may be repeated, runs some of them.

Exits with 1, all figures written, where something that was promised does not hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

NAMES = (
    "start_up",
    "aggregation",
    "simulation",
    "flower_app",
    "flower_engine",
    "round_memory",
    "population",
    "coordinator_memory",
    "device_memory",
    "rounds",
    "hostile",
    "coordinator_kills",
    "simulation_kills",
    "loader",
    "sentiment",
    "collectives",
    "gradient_exchange",
    "gradient_overlap",
    "pipeline_bubble",
    "experts",
    "planner",
    "pretraining",
    "sharded_memory",
    "recovery",
    "gpu_pretrain",
    "gpu_simulation",
    "predict",
    "generation",
    "serving",
    "compression",
    "weight_quantization",
    "robustness",
    "update_compression",
    "secagg",
    "secure_fleet",
    "privacy",
    "console",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, help="may be repeated")
    results: dict[str, dict[str, Any]] = {}
    for name in parser.parse_args().only or NAMES:
        # Imported one by one: what one of them loads must not count as memory of the next.
        results[name] = _figures(name)
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps({"machine": platform.processor() or platform.machine(), **results}, indent=2))
    print(f"written to {path}")
    if missed := [f"{name}: {what}" for name, found in results.items() for what in found.get("failures", [])]:
        sys.exit("\n".join(["what was promised and does not hold:", *missed]))


def _figures(name: str) -> dict[str, Any]:
    """What a benchmark found; `failures` has what it promised in vain, so that the others' figures are kept."""
    try:
        found: dict[str, Any] = import_module(f"tests.bench.{name}").run()
    except AssertionError as error:
        print(f"{name} FAILS: {error}")
        return {"failures": [str(error)]}
    return found


if __name__ == "__main__":
    main()
