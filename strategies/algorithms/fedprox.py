"""FedProx: FedAvg with a proximal term in the local loss. Li 2020, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.client_rules import Proximal
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping


@dataclass(frozen=True)
class FedProx:
    mu: float = options.field(0.01, "weight of the proximal term", low=0.0)
    server_lr: float = options.server_lr()
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean = WeightedMean(self.weighting)
        optimizer = SGD(self.server_lr)
        return Strategy("fedprox", Proximal(self.mu), clipping(self.clip_norm), mean, optimizer)
