"""Ditto: each client trains a model of its own beside the global one, which pulls it. Li 2021b, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.personalisation import PersonalModel
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping


@dataclass(frozen=True)
class Ditto:
    mu: float = options.field(0.1, "weight of the pull towards the global model", low=0.0)
    server_lr: float = options.server_lr()
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        rule, mean = PersonalModel(self.mu), WeightedMean(self.weighting)
        clips = clipping(self.clip_norm)
        return Strategy("ditto", rule, clips, mean, SGD(self.server_lr), modes=("sync",))
