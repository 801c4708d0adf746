"""What a batch takes, by its size: the table from which the scheduler chooses."""

from __future__ import annotations

import time
from collections.abc import Sequence

from models.serving.opening import OpenedModel, Rows

MOST_SECONDS = 1.0
"""For the measurements of one size."""


def measure(model: OpenedModel, sizes: Sequence[int], repeats: int) -> dict[str, float]:
    """Seconds of a batch by its number of rows: the median of `repeats`, after one that is not counted.

    Ends before a size that would take longer than `MOST_SECONDS` in all; from there on batches take time in proportion.
    """
    found: dict[str, float] = {}
    seconds, last = 0.0, 1
    for size in sizes:
        if found and seconds * size / last * (repeats + 1) > MOST_SECONDS:
            break
        x = model.example(size)
        model.compute(x)
        took = [_time(model, x) for _ in range(repeats)]
        seconds, last = sorted(took)[len(took) // 2], size
        found[str(size)] = seconds
    return found


def _time(model: OpenedModel, x: Rows) -> float:
    began = time.perf_counter()
    model.compute(x)
    return time.perf_counter() - began
