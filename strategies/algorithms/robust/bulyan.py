"""Bulyan: Krum chooses updates, then each coordinate is the mean of the values around the median. El Mhamdi 2018, Algorithm 1.

Of n updates n - 2f are chosen, one after the other, each by Krum among those left; of their values at a coordinate the
n - 4f nearest to the median count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.robust import Combination, Geometry, Matrix, RobustPreset, Rule, krum_scores


@dataclass(frozen=True)
class BulyanRule(Rule):
    def fewest_updates(self, malicious: int) -> int:
        return 4 * malicious + 3

    def combine(self, updates: int, malicious: int, geometry: Geometry | None) -> Combination:
        assert geometry is not None
        distances, left = geometry.distances(), list(range(updates))
        weights = np.zeros((updates - 2 * malicious, updates))
        for row in weights:
            best = int(np.argmin(krum_scores(distances[np.ix_(left, left)], malicious)))
            row[left.pop(best)] = 1

        def reduce(values: Matrix) -> Matrix:
            nearest = np.argsort(np.abs(values - np.median(values, axis=0)), axis=0, kind="stable")
            around = np.take_along_axis(values, nearest[: updates - 4 * malicious], axis=0)
            return np.asarray(around.mean(axis=0))

        return Combination(reduce, weights)


@dataclass(frozen=True)
class Bulyan(RobustPreset):
    name: ClassVar[str] = "bulyan"

    def rule(self) -> BulyanRule:
        return BulyanRule()
