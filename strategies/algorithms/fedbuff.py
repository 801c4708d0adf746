"""FedBuff: the server steps at every K updates, whichever version they started from. Nguyen 2022, Algorithm 1.

K is `federation.buffer`, the number of clients that train at a time `federation.concurrency`, and what a stale update counts
for `federation.staleness`.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.client_rules import PlainSGD
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping


@dataclass(frozen=True)
class FedBuff:
    server_lr: float = options.server_lr()
    momentum: float = options.decay(0.0, "server momentum")
    weighting: Weighting = options.weighting("uniform")
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean = WeightedMean(self.weighting)
        optimizer = SGD(self.server_lr, self.momentum)
        clips = clipping(self.clip_norm)
        return Strategy("fedbuff", PlainSGD(), clips, mean, optimizer, modes=("async",))
