"""RFA: the geometric median, by the smoothed Weiszfeld algorithm. Pillutla 2022, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies import options
from strategies.robust import Combination, Geometry, RobustPreset, Rule

_TOLERANCE = 1e-10
"""Largest relative change of a weight at which the iteration ends: the weight of a huge update is tiny, and counts."""


@dataclass(frozen=True)
class GeometricMedianRule(Rule):
    """`smoothing`: distances below it count as it. `iterations`: at most."""

    smoothing: float
    iterations: int

    def combine(self, updates: int, malicious: int, geometry: Geometry | None) -> Combination:
        assert geometry is not None
        weights = np.full(updates, 1 / updates)
        for _ in range(self.iterations):
            before, weights = weights, 1 / np.maximum(geometry.distances_to(weights), self.smoothing)
            weights /= weights.sum()
            if float(np.abs(weights / before - 1).max()) <= _TOLERANCE:
                break
        return Combination(lambda values: values[0], weights[None])


@dataclass(frozen=True)
class RFA(RobustPreset):
    name: ClassVar[str] = "rfa"

    smoothing: float = options.field(1e-6, "distances below it count as it", low=0.0, low_open=True)
    iterations: int = options.field(100, "iterations of the Weiszfeld algorithm, at most", low=1)

    def rule(self) -> GeometricMedianRule:
        return GeometricMedianRule(self.smoothing, self.iterations)
