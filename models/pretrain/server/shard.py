"""One server's share of the params, and how they change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from models.pretrain import optimizers
from models.pretrain.training import Options

Tensors = list[torch.Tensor]


def split(module: nn.Module, shards: int) -> list[list[nn.Parameter]]:
    """Parameters that are trained, by shard, with bytes as even as can be: the largest first, to who has least."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found: list[list[int]] = [[] for _ in range(shards)]
    bytes_of = [0] * shards
    for index in sorted(range(len(parameters)), key=lambda index: -parameters[index].nbytes):
        least = bytes_of.index(min(bytes_of))
        found[least].append(index)
        bytes_of[least] += parameters[index].nbytes
    return [[parameters[index] for index in sorted(indices)] for indices in found]


class Shard:
    """Params, optimizer and the number of updates made.

    Args:
        steps: global batches of the training.
        updates_per_step: how many updates a global batch makes; the learning rate is that of the batch.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], options: Options, steps: int, updates_per_step: int
    ) -> None:
        self.parameters, self.options, self.steps = list(parameters), options, steps
        self.updates_per_step = updates_per_step
        self.version = 0
        self._optimizers = optimizers.build([nn.ParameterList(parameters)], options) if parameters else []

    def apply(self, gradients: Tensors) -> None:
        """One step of the optimizer."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self.options.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.options.clip_norm)
        rate = self.options.rate(self.version // self.updates_per_step, self.steps)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.version += 1

    def values(self) -> Tensors:
        """The params as they are now; later updates do not change them."""
        return [parameter.detach().clone() for parameter in self.parameters]


def mean(gradients: Sequence[Tensors]) -> Tensors:
    """Of several workers' gradients, tensor by tensor."""
    return [torch.stack(alike).mean(0) for alike in zip(*gradients, strict=True)]
