"""SGD steps of many dense models at once, as batched matrix products written out forwards and backwards.

Shapes: S models, B rows of a batch, F features. A model that is done, or a row that only fills up a batch, has no part
in a step. The product that makes a weight's gradient is added to the weight by the same call, so no gradient is
stored; memory of activations is kept from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coordinator.workers.kernels.dense_chain import DenseChain

Weights = Mapping[str, torch.Tensor]
"""By name of the param, float32 [S, …]."""

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Batch:
    """One step's batch of S models.

    Attributes:
        x: float32 [S, B, F].
        y: labels [S, B]: int64 classes, or float32 quantities.
        scale: float32 [S, B]: −lr over the rows of the batch that count, 0 for a row that does not.
        losses: float32 [S, B], which the step writes.
    """

    x: torch.Tensor
    y: torch.Tensor
    scale: torch.Tensor
    losses: torch.Tensor


class DenseSteps:
    """Takes steps w ← keep · w − lr · ∇f(w) + pull on stacks of one chain's models, in place."""

    def __init__(self, chain: DenseChain) -> None:
        self._layers = tuple(enumerate(chain.layers))
        self._last = len(chain.layers) - 1
        self._measure = _squared_error if chain.regression else _cross_entropy
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, weights: Weights, batch: Batch, keep: float, pull: Weights) -> None:
        """One step. `keep`: factor of the old weights; `pull`: what is added to them, where not zero."""
        inputs = self._forward(weights, batch.x)
        slope = self._measure(inputs[-1], batch)
        slope.mul_(batch.scale.unsqueeze(1))
        self._backward(weights, inputs, slope, keep)
        for name, constant in pull.items():
            weights[name].add_(constant)

    def memory(self, name: str, *shape: int) -> torch.Tensor:
        """Uninitialised float32 memory of this shape, the same under a name as long as it is large enough."""
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self._memory[name] = torch.empty(size)
        return memory[:size].view(shape)

    def _forward(self, weights: Weights, x: torch.Tensor) -> list[torch.Tensor]:
        """The inputs of each layer [S, B, features], and the outputs of the last [S, classes, B]."""
        models, rows, _ = x.shape
        inputs = [x]
        for index, layer in self._layers:
            left, right, shape, row = (
                inputs[-1],
                weights[layer.weight].transpose(1, 2),
                (rows, layer.outputs),
                1,
            )
            if index == self._last:
                left, right, shape, row = right.transpose(1, 2), left.transpose(1, 2), shape[::-1], 2
            out = self.memory(f"out {index}", models, *shape)
            if layer.bias is None:
                torch.bmm(left, right, out=out)
            else:
                torch.baddbmm(weights[layer.bias].unsqueeze(row), left, right, out=out)
            if layer.activation:
                _FORWARD[layer.activation](out)
            inputs.append(out)
        return inputs

    def _backward(
        self, weights: Weights, inputs: Sequence[torch.Tensor], slope: torch.Tensor, keep: float
    ) -> None:
        """Moves the weights, last layer first. `slope`: −lr · ∂f/∂outputs, [S, classes, B]."""
        for index, layer in reversed(self._layers):
            if layer.activation:
                _BACKWARD[layer.activation](slope, inputs[index + 1], slope)
            by_output = slope if index == self._last else slope.transpose(1, 2)  # [S, outputs, B]
            weight, following = weights[layer.weight], slope
            if index:
                following = self.memory(f"slope {index}", *inputs[index].shape)
                torch.bmm(by_output.transpose(1, 2), weight, out=following)  # before the weight moves
            weight.baddbmm_(by_output, inputs[index], beta=keep)
            if layer.bias is not None:
                bias = weights[layer.bias]
                torch.add(by_output.sum(2), bias, alpha=keep, out=bias)
            slope = following


def _cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Writes the loss of every row, given logits [S, classes, B]; ∂loss/∂logits of every row, of the same shape.

    Over classes that lie side by side PyTorch's `log_softmax` takes five times as long if there are few of them.
    """
    labels = batch.y.unsqueeze(1)
    log_probabilities = torch.log_softmax(logits, 1)
    torch.neg(log_probabilities.gather(1, labels).squeeze(1), out=batch.losses)
    return log_probabilities.exp_().scatter_add_(1, labels, _MINUS_ONE.expand(labels.shape))


def _squared_error(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `_cross_entropy`, of outputs [S, 1, B]."""
    errors = outputs - batch.y.unsqueeze(1)
    torch.square(errors.squeeze(1), out=batch.losses)
    return errors.mul_(2)


_MINUS_ONE = torch.full((1, 1, 1), -1.0)

_FORWARD = {"relu": torch.relu_, "tanh": torch.tanh_, "sigmoid": torch.sigmoid_}


def _relu_slope(slope: torch.Tensor, output: torch.Tensor, result: torch.Tensor) -> None:
    _aten.threshold_backward.grad_input(slope, output, 0, grad_input=result)


def _tanh_slope(slope: torch.Tensor, output: torch.Tensor, result: torch.Tensor) -> None:
    _aten.tanh_backward.grad_input(slope, output, grad_input=result)


def _sigmoid_slope(slope: torch.Tensor, output: torch.Tensor, result: torch.Tensor) -> None:
    _aten.sigmoid_backward.grad_input(slope, output, grad_input=result)


_BACKWARD = {"relu": _relu_slope, "tanh": _tanh_slope, "sigmoid": _sigmoid_slope}
"""Each turns the slope by an activation's output into that by its input."""
