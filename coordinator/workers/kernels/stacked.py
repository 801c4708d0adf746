"""Trains many clients as one batched computation: a stack of models, each with its own params, batches and labels.

For a chain of dense layers (`coordinator.workers.kernels.dense_chain`) a step of the whole stack is a few batched matrix
products, written out forwards and backwards. The product that makes a weight's gradient is added to the weight by the
same call, so no gradient is stored; buffers are kept from stack to stack. The steps are those of
`edge_client.train.torch_trainer` (∇f, then mu · (w − w₀) and the offset), sums in another order: results agree to float32
rounding.

A client's result depends, in its last bits, on the stack it is in. Whoever composes stacks does so by position in the
cohort, never by the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coordinator.workers.kernels.dense_chain import Dense, DenseChain
from coordinator.workers.kernels.layout import Layout, Rows, Work, lay_out
from strategies.params import FloatArray, Params, Tensors

_ALIGNMENT = 16
_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Stack:
    """What a stack of clients learnt, in the order of the clients.

    Attributes:
        deltas: trained minus base by tensor name, float32 [clients, …]. They are overwritten by the next stack.
        steps: steps that each client took.
        losses: each client's mean training loss per example over its steps.
    """

    deltas: Params
    steps: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float64]


class StackedTrainer:
    """Trains stacks of up to `size` clients on rows of `x` and `y`."""

    def __init__(self, chain: DenseChain, x: npt.NDArray[Any], y: npt.NDArray[Any], size: int) -> None:
        self._chain = chain
        self._x = x.reshape(len(x), -1)
        self._y = y
        self._size = size
        self._weights = {
            name: torch.empty(size, *shape) for layer in chain.layers for name, shape in _shapes(layer)
        }
        self._memory: dict[str, torch.Tensor] = {}

    def train(
        self,
        base: Tensors,
        work: Work,
        parts: Sequence[Rows],
        seeds: Sequence[int],
        offsets: Sequence[Params] | None = None,
    ) -> Stack:
        """Trains the clients that have these rows and seeds. `offsets`: of each client (`client_rules.Correction`)."""
        layout = lay_out(parts, seeds, work)
        with torch.inference_mode():
            for name, weight in self._weights.items():
                np.copyto(weight[: len(parts)].numpy(), base[name])
            pull = self._pull(base, work, layout, offsets)
            losses = self._take_steps(layout, work, pull)
        return Stack(self._deltas(base, layout), layout.steps[_inverse(layout.order)], losses[_inverse(layout.order)])

    def _pull(
        self, base: Tensors, work: Work, layout: Layout, offsets: Sequence[Params] | None
    ) -> Mapping[str, torch.Tensor]:
        """What every step adds to the weights whatever the batch: lr · (mu · w₀ − offset); empty if that is nothing."""
        if not work.mu and offsets is None:
            return {}
        pull = {}
        for name in self._weights:
            constant = np.asarray(base[name], np.float32) * np.float32(work.lr * work.mu)
            if offsets is None:
                pull[name] = torch.from_numpy(constant[None])
                continue
            each = np.stack([offsets[client][name] for client in layout.order])
            pull[name] = torch.from_numpy(constant - np.float32(work.lr) * each)
        return pull

    def _take_steps(
        self, layout: Layout, work: Work, pull: Mapping[str, torch.Tensor]
    ) -> npt.NDArray[np.float64]:
        """Trains the weights in place; the mean loss of each slot."""
        labels, counted, scale = self._label(layout, work)
        losses = np.zeros(layout.rows.shape, np.float32)
        keep = 1 - work.lr * work.mu
        steps = zip(torch.from_numpy(labels), torch.from_numpy(scale), torch.from_numpy(losses), strict=True)
        for step, (label, weight, loss) in enumerate(steps):
            active = layout.active(step)
            width = int(layout.sizes[step].max())
            inputs = self._forward(layout.rows[step, :active, :width])
            label, weight, loss = (each[:active, :width] for each in (label, weight, loss))
            measure = self._squared_error if self._chain.regression else self._cross_entropy
            slope = measure(inputs[-1], label, loss)
            slope.mul_(weight.unsqueeze(-1))
            self._backward(inputs, slope, keep, pull)
        return _mean_losses(losses, counted, layout.sizes)

    def _label(self, layout: Layout, work: Work) -> tuple[npt.NDArray[Any], ...]:
        """Labels, which of them count, and the factor of each row's gradient, −lr / counted rows of its batch."""
        labels = self._y[layout.rows]
        real = np.arange(layout.rows.shape[2]) < layout.sizes[..., None]
        if self._chain.regression:
            from models.labels import LEAST_QUANTITY

            counted = real & (labels > LEAST_QUANTITY)
            labels = np.where(counted, labels, 0).astype(np.float32)
        else:
            counted = real & (labels >= 0) & (labels < self._chain.layers[-1].outputs)
            labels = np.where(counted, labels, 0).astype(np.int64)
        with np.errstate(divide="ignore", invalid="ignore"):  # a batch without a label has no gradient: NaN
            scale = counted * (-work.lr / counted.sum(-1, keepdims=True))
        return labels, counted, scale.astype(np.float32)

    def _forward(self, rows: Rows) -> list[torch.Tensor]:
        """The inputs of each layer for these rows [slots, width] of the data, and the outputs of the last."""
        clients, width = rows.shape
        x = self._buffer("x", clients, width, self._x.shape[1])
        # Without `mode` numpy would fill a copy first.
        np.take(self._x, rows.reshape(-1), axis=0, out=x.numpy().reshape(-1, self._x.shape[1]), mode="clip")
        inputs = [x]
        for index, layer in enumerate(self._chain.layers):
            weight = self._weights[layer.weight][:clients].transpose(1, 2)
            out = self._buffer(f"out {index}", clients, width, layer.outputs)
            if layer.bias is None:
                torch.bmm(inputs[-1], weight, out=out)
            else:
                bias = self._weights[layer.bias][:clients].unsqueeze(1)
                torch.baddbmm(bias, inputs[-1], weight, out=out)
            if layer.activation:
                _FORWARD[layer.activation](out)
            inputs.append(out)
        return inputs

    def _cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Writes the loss of every row; ∂loss/∂logits of every row."""
        log_probabilities = torch.log_softmax(logits, -1)
        torch.neg(log_probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1), out=losses)
        slope = log_probabilities.exp_()
        return slope.scatter_add_(-1, labels.unsqueeze(-1), _MINUS_ONE.expand(*labels.shape, 1))

    def _squared_error(self, outputs: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """As `_cross_entropy`, of outputs [slots, width, 1]."""
        errors = outputs - labels.unsqueeze(-1)
        torch.square(errors.squeeze(-1), out=losses)
        return errors.mul_(2)

    def _backward(
        self, inputs: Sequence[torch.Tensor], slope: torch.Tensor, keep: float, pull: Mapping[str, torch.Tensor]
    ) -> None:
        """Moves the weights, last layer first. `slope`: −lr · ∂loss/∂outputs."""
        clients = len(slope)
        for index in reversed(range(len(self._chain.layers))):
            layer = self._chain.layers[index]
            if layer.activation:
                _BACKWARD[layer.activation](slope, inputs[index + 1])
            weight = self._weights[layer.weight][:clients]
            following = slope
            if index:
                following = self._buffer(f"slope {index}", *inputs[index].shape)
                torch.bmm(slope, weight, out=following)  # before the weight moves
            weight.baddbmm_(slope.transpose(1, 2), inputs[index], beta=keep)
            if layer.bias is not None:
                bias = self._weights[layer.bias][:clients]
                torch.add(slope.sum(1), bias, alpha=keep, out=bias)
            slope = following
        for name, constant in pull.items():
            self._weights[name][:clients].add_(constant[:clients])

    def _deltas(self, base: Tensors, layout: Layout) -> Params:
        """Trained minus base, in the order of the clients."""
        slots = _inverse(layout.order)
        sorted_already = bool((slots == np.arange(len(slots))).all())
        deltas: Params = {}
        for name, weight in self._weights.items():
            trained: FloatArray = weight.numpy()[: len(slots)]
            trained -= base[name]
            deltas[name] = trained if sorted_already else trained[slots]
        return deltas

    def _buffer(self, name: str, clients: int, width: int, features: int) -> torch.Tensor:
        """Memory of this shape, kept under its name from step to step."""
        size = clients * width * features
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self._memory[name] = torch.empty(size)
        return memory[:size].view(clients, width, features)


_MINUS_ONE = torch.full((1, 1, 1), -1.0)

_FORWARD = {"relu": torch.relu_, "tanh": torch.tanh_, "sigmoid": torch.sigmoid_}


def _relu_slope(slope: torch.Tensor, output: torch.Tensor) -> None:
    _aten.threshold_backward.grad_input(slope, output, 0, grad_input=slope)


def _tanh_slope(slope: torch.Tensor, output: torch.Tensor) -> None:
    _aten.tanh_backward.grad_input(slope, output, grad_input=slope)


def _sigmoid_slope(slope: torch.Tensor, output: torch.Tensor) -> None:
    _aten.sigmoid_backward.grad_input(slope, output, grad_input=slope)


_BACKWARD = {"relu": _relu_slope, "tanh": _tanh_slope, "sigmoid": _sigmoid_slope}
"""Each turns, in place, a slope by the output of the activation into one by its input."""


def _shapes(layer: Dense) -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = [(layer.weight, (layer.outputs, layer.inputs))]
    if layer.bias is not None:
        shapes.append((layer.bias, (layer.outputs,)))
    return shapes


def _inverse(order: Rows) -> Rows:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def _mean_losses(
    losses: npt.NDArray[np.float32], counted: npt.NDArray[np.bool_], sizes: Rows
) -> npt.NDArray[np.float64]:
    """Mean over steps, weighted by their examples, of the mean loss of each batch; by slot."""
    with np.errstate(invalid="ignore"):
        batch = np.where(counted, losses, 0).sum(-1, dtype=np.float64) / counted.sum(-1)
    means: npt.NDArray[np.float64] = np.where(sizes, batch, 0) * sizes
    return means.sum(0) / sizes.sum(0)
