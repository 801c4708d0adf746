"""Runs the benchmarks and writes `runs/bench/<time>.json`; `--only NAME`, which may be repeated, runs some of them."""

from __future__ import annotations

import argparse
import json
import platform
from datetime import datetime
from importlib import import_module
from pathlib import Path

NAMES = (
    "start_up",
    "aggregation",
    "simulation",
    "round_memory",
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
    "pipeline_bubble",
    "planner",
    "recovery",
    "gpu_pretrain",
    "predict",
    "compression",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, help="may be repeated")
    results: dict[str, object] = {"machine": platform.processor() or platform.machine()}
    for name in parser.parse_args().only or NAMES:
        # Imported one by one: what one of them loads must not count as memory of the next.
        results[name] = import_module(f"tests.bench.{name}").run()
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(results, indent=2))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
