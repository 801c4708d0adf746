"""FedAdam: Adam on the server. Reddi 2021, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies import options
from strategies.client_rules import PlainSGD
from strategies.strategy import Adaptive, AdaptiveKind, Strategy, WeightedMean, Weighting, clipping


@dataclass(frozen=True)
class FedAdam:
    kind: ClassVar[AdaptiveKind] = "adam"
    server_lr: float = options.server_lr(0.03)
    beta1: float = options.decay(0.9, "decay of the first moment")
    beta2: float = options.decay(0.99, "decay of the second moment")
    tau: float = options.tau()
    flower_form: bool = options.flower_form()
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean = WeightedMean(self.weighting)
        optimizer = Adaptive(self.kind, self.server_lr, self.beta1, self.beta2, self.tau, self.flower_form)
        return Strategy(f"fed{self.kind}", PlainSGD(), clipping(self.clip_norm), mean, optimizer)
