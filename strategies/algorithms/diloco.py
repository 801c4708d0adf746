"""DiLoCo: AdamW on the clients for many steps, then Nesterov momentum on the server. Douillard 2023, Algorithm 1.

What the clients do is set in [local], whose defaults are then those of the paper: `optimizer = "adamw"`, a weight decay of 0.1, and
moments that each client keeps from round to round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies import options
from strategies.client_rules import PlainSGD
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping

_LOCAL = {"optimizer": "adamw", "weight_decay": 0.1, "keep_moments": True}


@dataclass(frozen=True)
class DiLoCo:
    runtimes: ClassVar[tuple[str, ...]] = ("torch",)
    server_lr: float = options.server_lr(0.7)
    momentum: float = options.decay(0.9, "server momentum")
    nesterov: bool = options.nesterov(True)
    weighting: Weighting = options.weighting("uniform")
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean, optimizer = WeightedMean(self.weighting), SGD(self.server_lr, self.momentum, self.nesterov)
        clips = clipping(self.clip_norm)
        return Strategy("diloco", PlainSGD(), clips, mean, optimizer, modes=("sync",), local_defaults=_LOCAL)
