"""Virtual time in which each client takes a number of seconds for a step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coordinator.fleets.simulated_clients import Presence, VirtualTime


def clock_of(seconds: Iterable[float], dropout: float = 0.0, presence: Presence | None = None) -> VirtualTime:
    """`seconds`: that the clients take for a step, in their order."""
    factors = np.array(list(seconds), np.float64)
    return VirtualTime(1.0, factors, np.full(len(factors), dropout), seed=7, presence=presence)
