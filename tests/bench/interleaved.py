"""Timing several ways of doing one thing in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def medians(
    ways: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each way by `clock`; the first turn of each is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            began = clock()
            way()
            if turn:
                seconds[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}
