"""Central differential privacy: the coordinator adds Gaussian noise to the sum of a round's clipped updates (McMahan 2018, Algorithm 1).

    strategy = noise.limit(strategy, clip_norm)        updates of norm clip_norm at most, each counting once
    aggregate = strategy.start(n) … finish()           their sum, divided by the cohort's expected size
    aggregate = noise.add_noise(aggregate, …)          Gaussian noise on the sum
    clip_norm = noise.next_clip_norm(…)                adaptive clipping only

The sum is divided by a fixed number, never by the number of updates that came, which one client would change. Every client counts
alike, whatever number of examples it claims.

Adaptive clipping (Andrew 2021, Algorithm 1) moves the norm towards a quantile of the norms of updates. It counts those that
are not longer than the norm, with noise of its own. A share of the noise multiplier pays for that count, so that both
releases together are as private as one sum with the multiplier alone (Theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from strategies.params import Tensors, materialize, shape_of
from strategies.privacy.noise.additive import NoiseSource
from strategies.strategy import ClipNorm, MeanFold, Strategy, WeightedMean, Weighting, mean_of_nodes
from strategies.update import Aggregate

ROUNDING = 1 + 1e-6
"""By how much the noise is larger than asked for: scaling in float32 may leave an update longer than the norm by less than this."""

_SMALLEST_NORM, _LARGEST_NORM = 1e-9, 1e9


@dataclass(frozen=True)
class Adaptive:
    """How the clipping norm follows a quantile of the norms: C ← C · exp(−learning_rate · (share − quantile))."""

    quantile: float = 0.5
    learning_rate: float = 0.2


@dataclass(frozen=True)
class CentralNoise:
    """The mechanism of a run.

    Attributes:
        clip_norm: C, of the first round.
        noise_multiplier: z, of all that a round releases.
        cohort: expected number of clients in a round, m.
        adaptive: None: the norm stays as it is.
    """

    clip_norm: float
    noise_multiplier: float
    cohort: int
    adaptive: Adaptive | None = None

    @property
    def count_deviation(self) -> float:
        """Standard deviation of the noise on the count of short updates: m/20 (Andrew 2021, section 3), or z if that is more, so that
        most of the multiplier is left for the sum."""
        return max(self.cohort / 20, self.noise_multiplier)

    @property
    def sum_multiplier(self) -> float:
        """Standard deviation of the noise on the sum over the clipping norm. Andrew 2021, Theorem 1: (z⁻² − (2σ_b)⁻²)^(−1/2)."""
        if self.adaptive is None:
            return self.noise_multiplier
        return float((self.noise_multiplier**-2 - (2 * self.count_deviation) ** -2) ** -0.5)

    def limit(self, strategy: Strategy, clip_norm: float) -> Strategy:
        """The strategy with a sum of clipped updates in place of its mean."""
        return replace(
            strategy, transforms=(ClipNorm(clip_norm),), aggregator=ClippedMean(cohort=self.cohort)
        )

    def add_noise(self, aggregate: Aggregate, clip_norm: float, source: NoiseSource) -> Aggregate:
        """The aggregate with noise on the sum that it was divided from. The same source gives the same noise."""
        summed = materialize(aggregate.delta)
        rounding = source.rounding(sum(value.size for value in summed.values()))
        deviation = self.sum_multiplier * clip_norm * ROUNDING / self.cohort
        deviation *= _allowance(self.sum_multiplier, rounding)
        noised = {
            name: source.add(np.asarray(summed[name], np.float64), deviation) for name in sorted(summed)
        }
        return replace(aggregate, delta=noised)

    def next_clip_norm(self, clip_norm: float, norms: Collection[float], source: NoiseSource) -> float:
        """The clipping norm of the next round. `norms`: of the round's updates before they were clipped."""
        if self.adaptive is None:
            return clip_norm
        # A bit counts from its middle, so that no client moves the sum by more than a half.
        bits = sum(0.5 if norm <= clip_norm else -0.5 for norm in norms)
        deviation = self.count_deviation * _allowance(2 * self.count_deviation, source.rounding(1))
        share = 0.5 + float(source.add(np.array([bits]), deviation)[0]) / self.cohort
        moved = clip_norm * math.exp(-self.adaptive.learning_rate * (share - self.adaptive.quantile))
        return min(max(moved, _SMALLEST_NORM), _LARGEST_NORM)


def _allowance(multiplier: float, rounding: float) -> float:
    """By how much noise of this multiplier has to be larger, because rounding to its grid raises the sensitivity of what it is added to.

    `rounding`: of `NoiseSource`. The noise σ' has to be multiplier · (sensitivity + rounding · σ').
    """
    if multiplier * rounding >= 0.5:
        raise ValueError(
            f"the noise is {multiplier:g} times as large as what it hides, and rounding it would add too much to that; take less noise"
        )
    return 1 / (1 - multiplier * rounding)


@dataclass(frozen=True)
class ClippedMean(WeightedMean):
    """The sum of updates, each counting once, divided by the expected size of the cohort."""

    weighting: Weighting = "uniform"
    cohort: int = 1

    def start(self, cohort_size: int) -> ClippedFold:
        return ClippedFold(self.cohort, cohort_size)


class ClippedFold(MeanFold):
    """A sum in progress, as `MeanFold`; `divisor`: what it is divided by."""

    def __init__(self, divisor: int, stop: int) -> None:
        super().__init__("uniform", stop)
        self._divisor = divisor

    def finish(self) -> Aggregate:
        return mean_of_nodes(self.nodes(), self._divisor)


def nothing(trained: Tensors) -> Aggregate:
    """The aggregate of a round without updates: a sum of zero. `trained`: the params that clients send."""
    zeros = {name: np.zeros(shape_of(trained, name)) for name in trained}
    return Aggregate(zeros, {}, num_updates=0, num_examples=0, train_loss=math.nan)
