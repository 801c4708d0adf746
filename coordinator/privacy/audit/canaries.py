"""Canaries: invented clients whose updates show how much a mechanism hides.

A canary's update points along a coordinate that no other canary has, twice as long as the clipping bound allows. Half of the canaries take
part, drawn by a fair coin each; in each round those that take part are sampled as clients are. Who sees all released sums adds up each canary's
coordinate, and guesses from that who took part (`coordinator.privacy.audit.epsilon`). Andrew 2024, section 3; Steinke 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.privacy.audit import epsilon
from strategies.params import Params
from strategies.update import Update

Release = Callable[[Sequence[Update], int], Params]
"""What a mechanism makes public of the updates of a round, whose number is given: their sum, clipped and noised."""

NAME = "canary"
"""The one tensor of a canary's update."""


@dataclass(frozen=True)
class Bound:
    """A lower bound on epsilon, and what it was measured with.

    Attributes:
        lower: the least epsilon that the canaries do not refute, at this delta, with this confidence.
        strongest: the bound if every canary had been told; a claim above it cannot be refuted by so many.
        claimed: by the accountant; None: nothing is claimed.
    """

    canaries: int
    rounds: int
    lower: float
    strongest: float
    delta: float
    confidence: float
    claimed: float | None = None

    @property
    def is_refuted(self) -> bool:
        """Whether the mechanism is shown to be less private than claimed."""
        return self.claimed is not None and self.lower > self.claimed

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_refuted": self.is_refuted}


def measure(
    release: Release,
    clip_norm: float,
    rounds: int,
    probability: float,
    delta: float,
    rng: np.random.Generator,
    canaries: int,
    claimed: float | None = None,
) -> Bound:
    """The lower bound on epsilon of a mechanism whose rounds take each client with this `probability`."""
    scores, took_part = score(release, clip_norm, rounds, probability, rng, canaries)
    confidence = epsilon.CONFIDENCE
    lower = epsilon.bound_from_scores(scores, took_part, delta, confidence)
    strongest = epsilon.strongest_bound(canaries, delta, confidence)
    return Bound(canaries, rounds, lower, strongest, delta, confidence, claimed)


def score(
    release: Release,
    clip_norm: float,
    rounds: int,
    probability: float,
    rng: np.random.Generator,
    canaries: int,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Of each canary how much more of it is in the released sums than halfway, in units of the clipping bound; and whether it took part."""
    took_part = rng.random(canaries) < 0.5
    total = np.zeros(canaries, np.float64)
    for number in range(1, rounds + 1):
        sampled = np.flatnonzero(took_part & (rng.random(canaries) < probability))
        total += release([_update(index, canaries, clip_norm) for index in sampled.tolist()], number)[NAME]
    return total / clip_norm - rounds * probability / 2, took_part


def no_update(canaries: int) -> Params:
    """The sum of no canaries."""
    return {NAME: np.zeros(canaries, np.float32)}


def _update(index: int, canaries: int, clip_norm: float) -> Update:
    delta = np.zeros(canaries, np.float32)
    delta[index] = 2 * clip_norm
    return Update({NAME: delta}, 1, 1, 0.0)
