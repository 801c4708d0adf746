"""FedAvgM: FedAvg with momentum on the server. Hsu 2019, section 4.3."""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.client_rules import PlainSGD
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping


@dataclass(frozen=True)
class FedAvgM:
    server_lr: float = options.server_lr()
    momentum: float = options.decay(0.9, "server momentum")
    nesterov: bool = options.nesterov()
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean = WeightedMean(self.weighting)
        optimizer = SGD(self.server_lr, self.momentum, self.nesterov)
        return Strategy("fedavgm", PlainSGD(), clipping(self.clip_norm), mean, optimizer)
