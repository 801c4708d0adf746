"""Trimmed mean: the mean of each coordinate without its f least and f greatest values. Yin 2018, Definition 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.robust import Combination, Geometry, Matrix, RobustPreset


@dataclass(frozen=True)
class TrimmedMeanRule:
    needs_geometry = False

    def fewest_updates(self, malicious: int) -> int:
        return 2 * malicious + 1

    def combine(self, updates: int, malicious: int, geometry: Geometry | None) -> Combination:
        def reduce(values: Matrix) -> Matrix:
            return np.asarray(np.sort(values, axis=0)[malicious : updates - malicious].mean(axis=0))

        return Combination(reduce)


@dataclass(frozen=True)
class TrimmedMean(RobustPreset):
    name: ClassVar[str] = "trimmed_mean"

    def rule(self) -> TrimmedMeanRule:
        return TrimmedMeanRule()
