"""Trains many clients as one batched computation: a stack of models, each with its own params, batches and labels.

It serves chains of dense layers (`coordinator.workers.kernels.dense_chain`), whose products are so small that most of the
time of a step is spent around them. The steps are those of `edge_client.train.torch_trainer`, sums in another order:
results agree to float32 rounding.

A client's result depends, in its last bits, on the stack it is in. Whoever composes jobs does so by position in the
cohort, never by the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coordinator.workers.kernels.changed_steps import ChangedSteps
from coordinator.workers.kernels.dense_chain import DenseChain
from coordinator.workers.kernels.dense_steps import Batch, DenseSteps
from coordinator.workers.kernels.layout import Layout, Rows, Work, lay_out
from coordinator.workers.training import ClientTasks, Stack, complete
from coordinator.workers.workspace_arrays import Workspace
from edge_client.train.trainer import LocalResult
from models.labels import MIN_QUANTITY
from strategies.params import Params

STACKED_VALUES = 2**20
"""Params of a stack, at most, so that they stay in a processor's cache from step to step."""
LARGEST_STACK = 128


class StackedTrainer:
    """A `ClientTrainer` of models that are a dense chain."""

    def __init__(self, chain: DenseChain) -> None:
        self._chain = chain
        self._shapes: dict[str, tuple[int, ...]] = {}
        for layer in chain.layers:
            self._shapes[layer.weight] = (layer.outputs, layer.inputs)
            if layer.bias is not None:
                self._shapes[layer.bias] = (layer.outputs,)
        values = sum(math.prod(shape) for shape in self._shapes.values())
        self._stack_size = max(1, min(LARGEST_STACK, STACKED_VALUES // values))
        self._steps = DenseSteps(chain)

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterable[LocalResult] | Stack:
        """Results in the order of the clients, which all have the same local work and rule.

        Raises:
            NoExamples: a client has no rows.
        """
        task, corrections = clients.task, clients.begin()
        work = Work.of(task, corrections[0])
        layout = lay_out(clients.rows, clients.seeds, work)
        offsets = [each.offset for each in corrections if each.offset is not None]
        with torch.inference_mode():
            weights = self._start(params, len(clients))
            pull = _pull(params, work, layout, offsets)
            losses = self._take_steps(layout, work, weights, pull, data)
        stack = _finish(params, weights, layout, losses)
        if not task.transforms(corrections[0]):
            return stack
        return complete(stack, clients, corrections)

    def _start(self, params: Params, models: int) -> dict[str, torch.Tensor]:
        """The weights of `models` models, which are those that all start from."""
        weights = {name: self._steps.memory(name, models, *shape) for name, shape in self._shapes.items()}
        for name, weight in weights.items():
            np.copyto(weight.numpy(), params[name])
        return weights

    def _take_steps(
        self,
        layout: Layout,
        work: Work,
        weights: Mapping[str, torch.Tensor],
        pull: Mapping[str, torch.Tensor],
        data: Workspace,
    ) -> npt.NDArray[np.float64]:
        """Trains the weights in place, stack by stack; the mean loss of each slot."""
        labels, counted, scale = self._label(layout, work, data.y)
        losses = np.zeros(layout.rows.shape, np.float32)
        keep = 1 - work.lr * work.mu
        x = data.x.reshape(len(data.x), -1)
        tensors = [torch.from_numpy(each) for each in (labels, scale, losses)]
        for first in range(0, len(layout.steps), self._stack_size):
            changed = ChangedSteps.of(work)
            sizes = layout.sizes[: layout.steps[first], first : first + self._stack_size]
            moving, pulling, before = weights, pull, 0
            active = np.count_nonzero(sizes, 1).tolist()
            for step, (models, width) in enumerate(zip(active, sizes.max(1).tolist(), strict=True)):
                slots = slice(first, first + models)
                if models != before:
                    moving = {name: weight[slots] for name, weight in weights.items()}
                    pulling = {name: each[slots] if len(each) > 1 else each for name, each in pull.items()}
                    before = models
                batch = Batch(
                    self._gather(x, layout.rows[step, slots, :width]),
                    *(each[step, slots, :width] for each in tensors),
                )
                with changed.steps(moving):
                    self._steps.take(moving, batch, keep, pulling)
        return _mean_losses(losses, counted, layout.sizes)

    def _gather(self, x: npt.NDArray[np.float32], rows: Rows) -> torch.Tensor:
        """These rows [models, width] of the data."""
        batch = self._steps.memory("x", *rows.shape, x.shape[1])
        # Without `mode` numpy would fill a copy first.
        np.take(x, rows, axis=0, out=batch.numpy(), mode="clip")
        return batch

    def _label(self, layout: Layout, work: Work, y: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
        """Labels, which of them count, and the factor of each row's gradient, −lr / counted rows of its batch."""
        labels = y[layout.rows]
        real = np.arange(layout.rows.shape[2]) < layout.sizes[..., None]
        if self._chain.regression:
            counted = real & (labels > MIN_QUANTITY)
            labels = np.where(counted, labels, 0).astype(np.float32)
        else:
            counted = real & (labels >= 0) & (labels < self._chain.layers[-1].outputs)
            labels = np.where(counted, labels, 0).astype(np.int64)
        with np.errstate(divide="ignore", invalid="ignore"):  # a batch without a label has no gradient: NaN
            scale = counted * (-work.lr / counted.sum(-1, keepdims=True))
        return labels, counted, scale.astype(np.float32)


def _pull(params: Params, work: Work, layout: Layout, offsets: Sequence[Params]) -> dict[str, torch.Tensor]:
    """What every step adds to the weights whatever the batch: lr · (mu · w₀ − offset); empty if that is nothing.

    Without offsets it is the same for all models, [1, …].
    """
    if not work.mu and not offsets:
        return {}
    pull = {}
    for name, start in params.items():
        constant = np.asarray(start, np.float32)[None] * np.float32(work.lr * work.mu)
        if offsets:
            constant = constant - np.float32(work.lr) * np.stack([offsets[at][name] for at in layout.order])
        pull[name] = torch.from_numpy(constant)
    return pull


def _finish(
    params: Params, weights: Mapping[str, torch.Tensor], layout: Layout, losses: npt.NDArray[np.float64]
) -> Stack:
    """The results in the order of the clients. Turns weights into deltas in place."""
    slots = np.empty_like(layout.order)
    slots[layout.order] = np.arange(len(slots))
    in_order = bool((layout.order == np.arange(len(slots))).all())
    deltas: Params = {}
    for name, weight in weights.items():
        trained = weight.numpy()
        trained -= params[name]
        deltas[name] = trained if in_order else trained[slots]
    return Stack(deltas, layout.steps[slots], losses[slots])


def _mean_losses(
    losses: npt.NDArray[np.float32], counted: npt.NDArray[np.bool_], sizes: Rows
) -> npt.NDArray[np.float64]:
    """Mean over steps, weighted by their examples, of the mean loss of each batch; by slot."""
    with np.errstate(invalid="ignore"):
        batch = np.where(counted, losses, 0).sum(-1, dtype=np.float64) / counted.sum(-1)
    sums = (np.where(sizes, batch, 0) * sizes).sum(0)
    return np.asarray(sums / sizes.sum(0), np.float64)
