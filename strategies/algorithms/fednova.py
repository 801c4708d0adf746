"""FedNova: each client's update is divided by its number of steps, so that more steps do not weigh more. Wang 2020, equation 7."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from strategies import options
from strategies.client_rules import PlainSGD
from strategies.cohort_fold import NeedsEachUpdate, SingleUpdates
from strategies.params import elementwise
from strategies.strategy import SGD, Aggregator, Fold, Strategy, WeightedMean, Weighting, clipping
from strategies.update import Aggregate, Update


@dataclass(frozen=True)
class NormalizedMean(NeedsEachUpdate):
    """tau · Σ pᵢ Δᵢ / tauᵢ, where tauᵢ is the number of steps and tau = Σ pᵢ tauᵢ.

    `mean`: weighted in the same way.
    """

    weighting: Weighting
    mean: Aggregator

    def start(self, cohort_size: int) -> NormalizedFold:
        return NormalizedFold(self.weighting, self.mean.start(cohort_size))


class NormalizedFold(SingleUpdates):
    """The mean of normalized updates, folded as they arrive."""

    def __init__(self, weighting: Weighting, mean: Fold) -> None:
        self._weighting = weighting
        self._mean = mean
        self._steps: dict[int, tuple[float, int]] = {}

    def add(self, position: int, update: Update) -> None:
        steps = update.num_steps
        normalized = elementwise(lambda value: np.divide(value, steps, dtype=np.float64), update.delta)
        self._mean.add(position, replace(update, delta=normalized))
        self._steps[position] = (float(update.num_examples) if self._weighting == "examples" else 1.0, steps)

    def finish(self) -> Aggregate:
        mean = self._mean.finish()
        weights = [self._steps[position] for position in sorted(self._steps)]
        steps = sum(weight * count for weight, count in weights) / sum(weight for weight, _ in weights)
        return replace(mean, delta=elementwise(lambda value: steps * value, mean.delta))


@dataclass(frozen=True)
class FedNova:
    server_lr: float = options.server_lr()
    momentum: float = options.decay(0.0, "server momentum")
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean = NormalizedMean(self.weighting, WeightedMean(self.weighting))
        optimizer = SGD(self.server_lr, self.momentum)
        clips = clipping(self.clip_norm)
        conflicts = {
            "momentum": "it divides updates by their number of steps, and momentum makes later steps longer",
            "optimizer": "it divides updates by what a client's gradients count for, which is known of SGD's steps",
        }
        return Strategy("fednova", PlainSGD(), clips, mean, optimizer, modes=("sync",), conflicts=conflicts)
