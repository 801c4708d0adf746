"""FedBN: each client keeps the normalization layers to itself. Li 2021a, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.personalisation import LocalTensors
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping


@dataclass(frozen=True)
class FedBN:
    local: tuple[str, ...] = options.local("*norm*")
    server_lr: float = options.server_lr()
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        rule, mean = LocalTensors(self.local), WeightedMean(self.weighting)
        clips = clipping(self.clip_norm)
        return Strategy("fedbn", rule, clips, mean, SGD(self.server_lr), modes=("sync",))
