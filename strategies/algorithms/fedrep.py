"""FedRep: each client trains its own last layer first, then the layers below, which are shared. Collins 2021, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from strategies import options
from strategies.personalisation import HeadThenBody
from strategies.strategy import SGD, Strategy, WeightedMean, Weighting, clipping

_CONFLICTS = {
    "clip_grad_norm": "the norm would count the gradients of tensors that a step leaves as they are"
}


@dataclass(frozen=True)
class FedRep:
    local: tuple[str, ...] = options.local("fc.*", "head.*")
    head_epochs: int = options.field(
        10, "epochs of the local tensors before the shared ones are trained", low=1
    )
    server_lr: float = options.server_lr()
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        rule, mean = HeadThenBody(self.local, self.head_epochs), WeightedMean(self.weighting)
        clips = clipping(self.clip_norm)
        optimizer = SGD(self.server_lr)
        return Strategy("fedrep", rule, clips, mean, optimizer, modes=("sync",), conflicts=_CONFLICTS)
