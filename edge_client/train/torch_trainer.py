"""Local training in PyTorch.

The step is written out (`autograd.grad` and in-place `_foreach` arithmetic): for small models an optimizer object
would take most of the time of a step. BatchNorm layers use frozen statistics, because running statistics are not
gradients and do not average; dropout, if the model has it, is active and seeded by the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from edge_client.data.examples import Examples
from edge_client.train.torch_adamw import TorchAdamW
from strategies.client_rules import Correction
from strategies.params import FloatArray, Params, Tensors, copy_into

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def divide_outputs(module: nn.Module, divisors: Mapping[str, float]) -> nn.Module:
    """The module, in place, whose layers of these names give their outputs divided by the number.

    Raises:
        AttributeError: it has no such layer.
    """

    def division(by: float) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
        return lambda layer, inputs, output: output / by

    for name, divisor in divisors.items():
        module.get_submodule(name).register_forward_hook(division(divisor))
    return module


class TorchRuntime:
    """Runs one module repeatedly, with params from outside."""

    name = "torch"

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self.module = module
        self._loss = loss
        self._weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.trainable: tuple[str, ...] = tuple(self._weights)
        # Views, found once: to walk through a module takes as long as a step of a small model.
        self._values = _arrays(module)
        self._in_training = False

    def take_steps(
        self, params: Tensors, batches: Iterable[Examples], lr: float, correction: Correction, seed: int
    ) -> tuple[Params, list[float]]:
        _fill(self._values, params)
        # `torch.manual_seed` would also note a stack trace for each other kind of device, which takes as long as a small client trains.
        torch.default_generator.manual_seed(seed)
        if not self._in_training:
            train_mode(self.module)
            self._in_training = True
        weights: list[torch.Tensor] = list(self._weights.values())
        start = [weight.detach().clone() for weight in weights] if correction.mu else []
        offset = [torch.from_numpy(correction.offset[n]) for n in self._weights] if correction.offset else []
        velocity: list[torch.Tensor] = []
        fixed = [name in correction.fixed for name in self._weights] if correction.fixed else []
        adamw = self._adamw(correction)
        losses = []
        for batch in batches:
            loss, gradients = self._differentiate(torch.from_numpy(batch.x), torch.from_numpy(batch.y))
            with torch.no_grad():
                if offset:
                    torch._foreach_add_(gradients, offset)
                if correction.mu:
                    torch._foreach_add_(gradients, torch._foreach_sub(weights, start), alpha=correction.mu)
                if correction.clip_grad_norm:
                    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
                    torch._foreach_mul_(gradients, correction.clip_factor(float(norm)))
                if correction.momentum:
                    if velocity:
                        torch._foreach_add_(gradients, velocity, alpha=correction.momentum)
                    velocity = gradients
                if adamw is None:
                    torch._foreach_add_(*_moved(weights, gradients, fixed), alpha=-lr)
                else:
                    adamw.step(*_moved(weights, gradients, fixed), lr)
            losses.append(loss)
        if adamw is not None:
            adamw.finish()
        return {name: weight.detach().numpy().copy() for name, weight in self._weights.items()}, losses

    def _adamw(self, correction: Correction) -> TorchAdamW | None:
        """AdamW on the tensors that the steps move; None: the steps are SGD."""
        if correction.adamw is None:
            return None
        free = {name: weight for name, weight in self._weights.items() if name not in correction.fixed}
        return TorchAdamW(correction.adamw, list(free), [weight.detach() for weight in free.values()])

    def _differentiate(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
        """The loss of a batch, and its gradient by each trainable tensor."""
        loss = self._loss(self.module(x), y)
        weights = list(self._weights.values())
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        return float(loss.detach()), list(gradients)

    def logits(self, params: Tensors, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        _fill(self._values, params)
        self.module.eval()
        self._in_training = False
        with torch.inference_mode():
            # A copy: `from_numpy` warns about read-only arrays, and a data set's rows may be read-only.
            answer: npt.NDArray[np.float32] = self.module(torch.tensor(x)).numpy()
        return answer


def _moved(
    weights: list[torch.Tensor], gradients: list[torch.Tensor], fixed: list[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights that a step moves, and their gradients."""
    if not fixed:
        return weights, gradients
    free = [index for index, is_fixed in enumerate(fixed) if not is_fixed]
    return [weights[index] for index in free], [gradients[index] for index in free]


def load(module: nn.Module, params: Tensors) -> None:
    """Copies canonical params into the module's own tensors.

    Raises:
        KeyError: a float tensor of the module is not in `params`.
    """
    _fill(_arrays(module), params)


def _arrays(module: nn.Module) -> dict[str, FloatArray]:
    """The memory of the module's own tensors. Written through numpy: `from_numpy` warns about read-only arrays, and received
    ones are read-only."""
    return {name: tensor.detach().numpy() for name, tensor in float_tensors(module).items()}


def _fill(arrays: dict[str, FloatArray], params: Tensors) -> None:
    for name, array in arrays.items():
        copy_into(array, params, name)


def read(module: nn.Module) -> Params:
    """The module's parameters and float buffers as canonical params, copied."""
    return {
        name: tensor.detach().to(torch.float32).contiguous().numpy().copy()
        for name, tensor in float_tensors(module).items()
    }


def statistics(module: nn.Module) -> list[str]:
    """Paths of the layers that normalize by running statistics of training rows."""
    return [
        path
        for path, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None
    ]


def float_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and float buffers of the state dict; a tied tensor once, under its first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def train_mode(module: nn.Module) -> None:
    """Training mode, except that BatchNorm keeps its running statistics."""
    module.train()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()
