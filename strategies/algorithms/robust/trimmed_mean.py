"""Trimmed mean: the mean of each coordinate without its f least and f greatest values. Yin 2018, Definition 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.robust import Combination, Geometry, Matrix, RobustPreset, Rule


@dataclass(frozen=True)
class TrimmedMeanRule(Rule):
    needs_geometry: ClassVar[bool] = False

    def combine(self, updates: int, malicious: int, geometry: Geometry | None) -> Combination:
        def reduce(values: Matrix) -> Matrix:
            return np.asarray(np.sort(values, axis=0)[malicious : updates - malicious].mean(axis=0))

        return Combination(reduce)


@dataclass(frozen=True)
class TrimmedMean(RobustPreset):
    name: ClassVar[str] = "trimmed_mean"

    def rule(self) -> TrimmedMeanRule:
        return TrimmedMeanRule()
