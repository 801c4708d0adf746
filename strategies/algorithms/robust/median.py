"""Median: the median of the updates at each coordinate. Yin 2018, Definition 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.robust import Combination, Geometry, Matrix, RobustPreset, Rule


@dataclass(frozen=True)
class MedianRule(Rule):
    needs_geometry: ClassVar[bool] = False

    def combine(self, updates: int, malicious: int, geometry: Geometry | None) -> Combination:
        return Combination(_median)


def _median(values: Matrix) -> Matrix:
    return np.asarray(np.median(values, axis=0))


@dataclass(frozen=True)
class Median(RobustPreset):
    name: ClassVar[str] = "median"

    def rule(self) -> MedianRule:
        return MedianRule()
