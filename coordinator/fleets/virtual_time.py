"""Virtual time: how long a simulated client would take, and whether it answers at all.

Each local step of a client takes `seconds_per_step` times a factor that is constant over the run: exp(spread · z), z
standard normal. Nothing waits; the numbers only decide the order of answers and the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.rounds.plan import generator


@dataclass(frozen=True)
class VirtualTime:
    """Speed factors of all clients. `dropout`: probability that a client does not answer in a round."""

    seconds_per_step: float
    factors: dict[str, float]
    dropout: float
    seed: int

    def duration_seconds(self, client: str, steps: int) -> float:
        return steps * self.seconds_per_step * self.factors[client]

    def drops_out(self, client: str, round_number: int) -> bool:
        return bool(generator(self.seed, f"dropout {client}", round_number).random() < self.dropout)


def virtual_time(
    clients: Sequence[str], seed: int, *, seconds_per_step: float, spread: float, dropout: float
) -> VirtualTime:
    """Speed factors drawn by `seed`; with `spread` 0 all clients are equally fast."""
    factors = np.exp(spread * generator(seed, "speed").standard_normal(len(clients)))
    return VirtualTime(seconds_per_step, dict(zip(clients, factors.tolist(), strict=True)), dropout, seed)
