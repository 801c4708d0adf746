"""SCAFFOLD: control variates correct client drift. Karimireddy 2020, Algorithm 1, option II."""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.client_rules import ControlVariates
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping

_CONFLICTS = dict.fromkeys(
    ("momentum", "clip_grad_norm", "optimizer"),
    "its control variates are gradients only where steps are plain SGD",
)
"""Option II reads the mean gradient off the distance, as `ControlVariates` says."""


@dataclass(frozen=True)
class Scaffold:
    server_lr: float = options.server_lr()
    weighting: Weighting = options.weighting("uniform")
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean = WeightedMean(self.weighting)
        optimizer = SGD(self.server_lr)
        clips = clipping(self.clip_norm)
        return Strategy(
            "scaffold", ControlVariates(), clips, mean, optimizer, modes=("sync",), conflicts=_CONFLICTS
        )
