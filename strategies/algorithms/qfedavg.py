"""q-FedAvg: clients on which the model is worse weigh more, so that it serves all alike. Li 2019, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from strategies import options
from strategies.client_rules import RECEIVED, MeasuredLoss
from strategies.cohort_fold import NeedsEachUpdate, SingleUpdates
from strategies.params import elementwise
from strategies.strategy import SGD, Aggregator, Fold, Strategy, WeightedMean, clipping
from strategies.update import Aggregate, Update

_EPSILON = 1e-10
"""Added to a loss, so that a client without one has a weight for every q, as in the authors' code."""


@dataclass(frozen=True)
class FairMean(NeedsEachUpdate):
    """Σ Fₖ^q Δₖ / Σ (Fₖ^q + q Fₖ^(q−1) L ‖Δₖ‖²), where Fₖ is the loss of the received model on client k.

    That is Algorithm 2 with Δwₖ = −L Δₖ, both sums divided by L. With q = 0 it is the mean. `mean`: without weights.
    """

    q: float
    lipschitz: float
    mean: Aggregator

    def start(self, cohort_size: int) -> FairFold:
        return FairFold(self.q, self.lipschitz, self.mean.start(cohort_size))


class FairFold(SingleUpdates):
    """The fair mean, folded as updates arrive."""

    def __init__(self, q: float, lipschitz: float, mean: Fold) -> None:
        self._q, self._lipschitz = q, lipschitz
        self._mean = mean
        self._shares: dict[int, float] = {}

    def add(self, position: int, update: Update) -> None:
        loss = max(0.0, float(update.extras[RECEIVED]["loss"][0])) + _EPSILON
        weight = loss**self._q
        slope = self._q * loss ** (self._q - 1) * self._lipschitz * update.norm**2
        weighted = elementwise(lambda value: np.multiply(value, weight, dtype=np.float64), update.delta)
        self._mean.add(position, replace(update, delta=weighted))
        self._shares[position] = weight + slope

    def finish(self) -> Aggregate:
        mean = self._mean.finish()
        scale = len(self._shares) / sum(self._shares[position] for position in sorted(self._shares))
        return replace(mean, delta=elementwise(lambda value: scale * value, mean.delta))


_CONFLICTS = {"optimizer": "it takes a client's distance times L for a gradient, which is so for SGD"}


@dataclass(frozen=True)
class QFedAvg:
    q: float = options.field(
        1.0, "how much more clients with a larger loss weigh; 0: no more", low=0.0, high=20.0
    )
    lipschitz: float = options.field(
        20.0, "L, how fast gradients change; an experiment takes 1 / local.lr", low=0.0, low_open=True
    )
    server_lr: float = options.server_lr()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean, optimizer = FairMean(self.q, self.lipschitz, WeightedMean("uniform")), SGD(self.server_lr)
        clips = clipping(self.clip_norm)
        return Strategy(
            "qfedavg", MeasuredLoss(), clips, mean, optimizer, modes=("sync",), conflicts=_CONFLICTS
        )
