"""FedNova: each client's update is divided by its number of steps, so that more steps do not weigh more. Wang 2020, equation 7.

With momentum on the clients it is divided by what all of the steps' gradients count for together, which is more than the number of steps.
"""

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
    """tau · Σ pᵢ Δᵢ / ‖aᵢ‖₁, where aᵢ is what each gradient of a client counts for (`gradient_weight`) and tau = Σ pᵢ ‖aᵢ‖₁.

    `mean`: weighted in the same way. `momentum`: of the clients' steps.
    """

    weighting: Weighting
    mean: Aggregator
    momentum: float = 0.0

    def start(self, cohort_size: int) -> NormalizedFold:
        return NormalizedFold(self.weighting, self.mean.start(cohort_size), self.momentum)


def gradient_weight(steps: int, momentum: float) -> float:
    """‖a‖₁ of so many steps: without momentum their number.

    With momentum ρ, which begins at 0 in each round, a = [1 − ρᵏ, 1 − ρᵏ⁻¹, …, 1 − ρ] / (1 − ρ) for k steps: the gradient of a step
    moves all later ones too. Wang 2020, section 4.1.
    """
    rest = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - rest) / (1 - momentum)


class NormalizedFold(SingleUpdates):
    """The mean of normalized updates, folded as they arrive."""

    def __init__(self, weighting: Weighting, mean: Fold, momentum: float) -> None:
        self._weighting = weighting
        self._mean = mean
        self._momentum = momentum
        self._steps: dict[int, tuple[float, float]] = {}

    def add(self, position: int, update: Update) -> None:
        steps = gradient_weight(update.num_steps, self._momentum)
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
    local_momentum: float = options.decay(
        0.0, "momentum of the clients' steps; an experiment takes local.momentum"
    )
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean = NormalizedMean(self.weighting, WeightedMean(self.weighting), self.local_momentum)
        optimizer = SGD(self.server_lr, self.momentum)
        clips = clipping(self.clip_norm)
        conflicts = {
            "optimizer": "it divides updates by what a client's gradients count for, which is known of SGD's steps",
        }
        return Strategy("fednova", PlainSGD(), clips, mean, optimizer, modes=("sync",), conflicts=conflicts)
