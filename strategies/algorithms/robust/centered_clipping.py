"""Centered clipping: moves a centre by the mean of the clipped differences to it. Karimireddy 2021, equation (CC).

The centre starts at no change of the model, where the paper takes the momentum of the round before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies import options
from strategies.robust import Combination, Geometry, RobustPreset, Rule


@dataclass(frozen=True)
class CenteredClippingRule(Rule):
    """`radius`: length that a difference is clipped to; 0: the median distance of the updates from the centre."""

    radius: float
    iterations: int

    def combine(self, updates: int, malicious: int, geometry: Geometry | None) -> Combination:
        assert geometry is not None
        weights = np.zeros(updates)
        for _ in range(self.iterations):
            distances = geometry.distances_to(weights)
            radius = self.radius or float(np.median(distances))
            kept = np.divide(radius, distances, out=np.ones(updates), where=distances > radius)
            weights = weights * (1 - kept.mean()) + kept / updates
        return Combination(lambda values: values[0], weights[None])


@dataclass(frozen=True)
class CenteredClipping(RobustPreset):
    name: ClassVar[str] = "centered_clipping"

    radius: float = options.field(
        0.0, "length that differences to the centre are clipped to; 0: their median", low=0.0
    )
    iterations: int = options.field(10, "times that the centre moves", low=1)

    def rule(self) -> CenteredClippingRule:
        return CenteredClippingRule(self.radius, self.iterations)
