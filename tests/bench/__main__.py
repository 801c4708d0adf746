"""Runs every benchmark and writes `runs/bench/<time>.json`."""

from __future__ import annotations

import json
import platform
from datetime import datetime
from pathlib import Path

from tests.bench import aggregation, simulation


def main() -> None:
    results = {
        "machine": platform.processor() or platform.machine(),
        "aggregation": aggregation.run(),
        "simulation": simulation.run(),
    }
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(results, indent=2))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
