"""FedAsync: each client's model is mixed into the server's as it arrives, the less the staler it is. Xie 2019, Algorithm 1.

x ← (1 − α s) x + α s xₖ, where xₖ is what the client made of the model that it received, and s is the weight of its staleness
(`federation.staleness`). With `federation.buffer` = 1, the default, every update is a step; with more, their mean is.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.client_rules import Proximal
from strategies.strategy import SGD, Strategy, WeightedMean, clipping


@dataclass(frozen=True)
class FedAsync:
    alpha: float = options.field(
        0.6, "share of a fresh client's model in the next one", low=0.0, high=1.0, low_open=True
    )
    mu: float = options.field(0.005, "weight of the proximal term of the local loss", low=0.0)
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        rule, mean, optimizer = Proximal(self.mu), WeightedMean("uniform"), SGD(self.alpha)
        clips = clipping(self.clip_norm)
        return Strategy("fedasync", rule, clips, mean, optimizer, modes=("async",), mixes_models=True)
