"""One server's shard of the params, and its optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from models.pretrain import optimizers
from models.pretrain.parallel.data import zero1
from models.pretrain.training import TrainingOptions

Tensors = list[torch.Tensor]


def split(module: nn.Module, shards: int) -> list[list[nn.Parameter]]:
    """Trainable parameters by shard, balanced by bytes: the largest first, to the smallest shard."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    owned = zero1.owned([parameter.nbytes for parameter in parameters], shards)
    return [[parameters[index] for index in indices] for indices in owned]


class Shard:
    """Params, optimizer and the number of updates made.

    Args:
        steps: global batches of the training.
        updates_per_step: updates per global batch; the learning rate follows global batches.
        undecayed: params that do not decay, as `models.pretrain.optimizers.without_decay`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        options: TrainingOptions,
        steps: int,
        updates_per_step: int,
        undecayed: Collection[int] = (),
    ) -> None:
        self.parameters, self.options, self.steps = list(parameters), options, steps
        self.updates_per_step = updates_per_step
        self.version = 0
        self._optimizer = optimizers.over(self.parameters, options, undecayed)

    def apply(self, gradients: Tensors) -> None:
        """Takes one step of the optimizer."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self.options.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.options.clip_norm)
        rate = self.options.rate(self.version // self.updates_per_step, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.version += 1

    def values(self) -> Tensors:
        """A copy of the current params."""
        return [parameter.detach().clone() for parameter in self.parameters]


def mean(gradients: Sequence[Tensors]) -> Tensors:
    """Mean of several workers' gradients, tensor by tensor."""
    return [torch.stack(alike).mean(0) for alike in zip(*gradients, strict=True)]
