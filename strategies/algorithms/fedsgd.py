"""FedSGD: one step of each client over all of its rows, which is a step of gradient descent over the rows of all. McMahan 2017, section 2."""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.client_rules import FullBatch
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping

_CONFLICTS = {
    "momentum": "a client takes one step, so there is none",
    "clip_grad_norm": "it would scale the gradient of a part of the rows; clip the update with strategy.clip_norm",
    "optimizer": "a client takes one step, of gradient descent",
}


@dataclass(frozen=True)
class FedSGD:
    server_lr: float = options.server_lr()
    momentum: float = options.decay(0.0, "server momentum")
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean, optimizer = WeightedMean(self.weighting), SGD(self.server_lr, self.momentum)
        clips = clipping(self.clip_norm)
        return Strategy("fedsgd", FullBatch(), clips, mean, optimizer, modes=("sync",), conflicts=_CONFLICTS)
