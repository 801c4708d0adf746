"""AdamW in PyTorch, written out like the other steps of `edge_client.train.torch_trainer`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from strategies.local_optimizers import AdamWState
from strategies.params import Params


class TorchAdamW:
    """Takes the steps of one local run, and puts the state where the client's next round finds it."""

    def __init__(self, state: AdamWState, names: Sequence[str], weights: list[torch.Tensor]) -> None:
        """`names`, `weights`: of the tensors that the steps move."""
        self._state = state
        self._names = names
        self._first = _moments(state.first, names, weights)
        self._second = _moments(state.second, names, weights)

    def step(self, weights: list[torch.Tensor], gradients: list[torch.Tensor], lr: float) -> None:
        """Moves the weights in place; the operations are those of `torch.optim.AdamW`, in their order."""
        options, state = self._state.options, self._state
        state.steps += 1
        torch._foreach_mul_(weights, 1 - lr * options.weight_decay)
        torch._foreach_lerp_(self._first, gradients, 1 - options.beta1)
        torch._foreach_mul_(self._second, options.beta2)
        torch._foreach_addcmul_(self._second, gradients, gradients, 1 - options.beta2)
        roots = torch._foreach_sqrt(self._second)
        torch._foreach_div_(roots, (1 - options.beta2**state.steps) ** 0.5)
        torch._foreach_add_(roots, options.eps)
        torch._foreach_addcdiv_(weights, self._first, roots, -lr / (1 - options.beta1**state.steps))

    def finish(self) -> None:
        """Hands the moments back."""
        self._state.first = _arrays(self._names, self._first)
        self._state.second = _arrays(self._names, self._second)


def _moments(kept: Params, names: Sequence[str], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of what was kept; zeros for the first round."""
    if not kept:
        return [torch.zeros_like(weight, memory_format=torch.preserve_format) for weight in weights]
    return [torch.from_numpy(np.array(kept[name], np.float32)) for name in names]


def _arrays(names: Sequence[str], tensors: list[torch.Tensor]) -> Params:
    return {name: tensor.numpy().copy() for name, tensor in zip(names, tensors, strict=True)}
