"""Inference serving: rates and memory beside LitServe and Ray Serve, batches, protocols, and loads beyond the capacity.

Rates are requests per CPU-second of a whole server. What is compared runs in turns, at least five times; a ratio is the median over
the turns. The plot of the loads is `runs/bench/serving-load.png`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.bench.serving_forks import forks
from tests.bench.serving_overload import overload
from tests.bench.serving_rates import against_peers, batching, memory_of_workers
from tests.bench.serving_wire import protocols

PICTURE = Path("runs/bench/serving-load.png")
LEAST = {
    "mlp, torch / LitServe": 5.0,
    "mlp, torch / Ray Serve": 15.0,
    "resnet8, torch / LitServe": 2.0,
    "resnet8, torch / Ray Serve": 6.0,
    "resnet8, the profile's choice / LitServe": 4.0,
    "mlp, 32 connections: batched / one by one": 2.5,
    "600 KB, binary: rate / JSON's": 4.0,
    "600 KB, gRPC: rate / JSON's": 4.0,
    "Poisson at 0.7: in time": 0.99,
    "Poisson at 1.2: in time / capacity": 0.85,
}
MOST = {
    "mlp, memory / LitServe's": 0.5,
    "resnet8, memory / LitServe's": 0.5,
    "mlp, 4 workers: memory / LitServe's": 0.5,
    "forked / fresh worker": 0.1,
    "mlp, one connection: p50 batched / one by one": 1.1,
    "12 KB, binary: bytes / JSON's": 0.4,
    "12 KB, gRPC: bytes / JSON's": 0.4,
    "Poisson at 1.2: late": 0.01,
    "Poisson at 1.2: refused late": 0.01,
}


def run() -> dict[str, Any]:
    """The figures; `failures`: those that are not what was promised."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in (
            against_peers(folder),
            memory_of_workers(folder),
            batching(folder),
            forks(folder),
            protocols(folder),
            overload(folder, PICTURE),
        ):
            figures |= part
            for title, value in part.items():
                print(f"{title:60} {value:12.3f}{_bound(title)}")
    missed = [
        f"{title}: {figures[title]:.3f}{_bound(title)}"
        for title in (*LEAST, *MOST)
        if _misses(figures, title)
    ]
    return {**figures, "failures": missed}


def _bound(title: str) -> str:
    if title in LEAST:
        return f"  (at least {LEAST[title]:g})"
    return f"  (at most {MOST[title]:g})" if title in MOST else ""


def _misses(figures: dict[str, Any], title: str) -> bool:
    value = figures[title]
    return not (value >= LEAST[title] if title in LEAST else value <= MOST[title])
