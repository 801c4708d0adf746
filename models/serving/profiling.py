"""What a batch takes, by its size: the table from which the scheduler chooses."""

from __future__ import annotations

import time
from collections.abc import Sequence

from models.serving.opening import OpenedModel


def measure(model: OpenedModel, sizes: Sequence[int], repeats: int) -> dict[str, float]:
    """Seconds of a batch by its number of rows: the median of `repeats`, after one that is not counted."""
    found: dict[str, float] = {}
    for size in sizes:
        x = model.example(size)
        model.compute(x)
        took = []
        for _ in range(repeats):
            began = time.perf_counter()
            model.compute(x)
            took.append(time.perf_counter() - began)
        found[str(size)] = sorted(took)[len(took) // 2]
    return found
