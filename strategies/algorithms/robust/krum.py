"""Krum and Multi-Krum: the updates that are nearest to their neighbours. Blanchard 2017, section 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.robust import Combination, Geometry, RobustPreset, Rule, krum_scores, mean_of


@dataclass(frozen=True)
class KrumRule(Rule):
    """`multi`: the mean of the n - f best updates instead of the best one."""

    multi: bool

    def combine(self, updates: int, malicious: int, geometry: Geometry | None) -> Combination:
        assert geometry is not None
        order = np.argsort(krum_scores(geometry.distances(), malicious), kind="stable")
        return mean_of(order[: updates - malicious if self.multi else 1], updates)


@dataclass(frozen=True)
class Krum(RobustPreset):
    """Krum: the update that is nearest to its neighbours. Blanchard 2017, section 4."""

    name: ClassVar[str] = "krum"

    def rule(self) -> KrumRule:
        return KrumRule(multi=False)


@dataclass(frozen=True)
class MultiKrum(RobustPreset):
    """Multi-Krum: the mean of the n - f updates that are nearest to their neighbours. Blanchard 2017, section 4."""

    name: ClassVar[str] = "multi_krum"

    def rule(self) -> KrumRule:
        return KrumRule(multi=True)
