"""FedAvg: local SGD on the clients, then the mean of their updates. McMahan 2017, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.client_rules import PlainSGD
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping


@dataclass(frozen=True)
class FedAvg:
    server_lr: float = options.server_lr()
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean = WeightedMean(self.weighting)
        optimizer = SGD(self.server_lr)
        return Strategy("fedavg", PlainSGD(), clipping(self.clip_norm), mean, optimizer)
