"""DP-SGD on the rows of a client (Abadi 2016, Algorithm 1): its steps hide whether any one row is there.

Each step takes each row by itself with the same probability (`edge_client.train.schedule.poisson_batches`), scales its gradient down to a norm,
adds up, adds Gaussian noise, and divides by the number of rows expected. Opacus computes the gradients of all rows of a batch at once where it
can, and adds the noise; of other models each row is differentiated alone, which is always right and slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn

from coordinator.errors import UserError
from coordinator.workers.training import ClientTasks
from coordinator.workers.workspace_arrays import Workspace
from edge_client.data.examples import Examples
from edge_client.train import schedule
from edge_client.train.torch_trainer import Loss, TorchRuntime, statistics, train_mode
from edge_client.train.trainer import LocalResult, Trainer
from models.zoo import KerasSpec, ModelSpec
from strategies.client_rules import Correction
from strategies.params import Params, Tensors
from strategies.privacy.central import ROUNDING

_TOLERANCE = 1e-3
_TRIAL_ROWS = 3


class PrivateRuntime(TorchRuntime):
    """PyTorch with noised gradients. It tells no training losses: they are 0.

    `clip_norm`: largest L2 norm of a row's gradient; `noise_multiplier`: standard deviation of the noise over it. `one_by_one`: rows are
    differentiated alone.
    """

    def __init__(
        self, module: nn.Module, loss: Loss, clip_norm: float, noise_multiplier: float, one_by_one: bool
    ) -> None:
        super().__init__(module, loss)
        self._row_loss = loss
        self._sampled = None if one_by_one else GradSampleModule(module, loss_reduction="sum")
        self._clip_norm, self._noise_multiplier = clip_norm, noise_multiplier
        self._expected_rows = 1
        self._optimizer: DPOptimizer | None = None

    def expect(self, rows: int) -> None:
        """Sets how many rows a batch has on average."""
        self._expected_rows = rows

    def take_steps(
        self, params: Tensors, batches: Iterable[Examples], lr: float, correction: Correction, seed: int
    ) -> tuple[Params, list[float]]:
        # Independent of the order of the rows and of the randomness inside the model, which have the seed itself.
        noise_seed = int(np.random.default_rng([seed, 1]).integers(2**63))
        self._optimizer = DPOptimizer(
            torch.optim.SGD(self._weights.values(), lr=lr),  # takes no step
            noise_multiplier=self._noise_multiplier * ROUNDING,
            max_grad_norm=self._clip_norm,
            expected_batch_size=self._expected_rows,
            generator=torch.Generator().manual_seed(noise_seed),
        )
        return super().take_steps(params, batches, lr, correction, seed)

    def _differentiate(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        assert self._optimizer is not None  # `take_steps`
        self._optimizer.zero_grad()
        for weight, gradients in zip(self._weights.values(), self.row_gradients(x, y), strict=True):
            weight.grad_sample = gradients  # type: ignore[attr-defined]
        self._optimizer.pre_step()
        found = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        return torch.zeros(()), found

    def row_gradients(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of each row's own loss by each trainable tensor, [rows, …]."""
        weights, rows = list(self._weights.values()), len(y)
        if not rows:
            return [torch.zeros(0, *weight.shape) for weight in weights]
        if self._sampled is None:
            alone = [
                super(PrivateRuntime, self)._differentiate(x[at : at + 1], y[at : at + 1])[1]
                for at in range(rows)
            ]
            return [torch.stack(each) for each in zip(*alone, strict=True)]
        for weight in weights:
            weight.grad = weight.grad_sample = None  # type: ignore[attr-defined]
        outputs = self._sampled(x)
        # A loss of the whole batch may be a mean over labels, of which rows have different numbers.
        losses = [self._row_loss(outputs[at : at + 1], y[at : at + 1]) for at in range(rows)]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        return [
            torch.zeros(rows, *weight.shape) if weight.grad_sample is None else weight.grad_sample  # type: ignore[attr-defined]
            for weight in weights
        ]


@dataclass(frozen=True)
class PrivateTrainer:
    """Trains one client after the other by DP-SGD."""

    runtime: PrivateRuntime

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterator[LocalResult]:
        trainer = Trainer(self.runtime, schedule.poisson_batches)
        for each in clients:
            self.runtime.expect(min(each.task.batch_size, len(each.rows)))
            yield trainer.train(params, each.task, Examples(data.x[each.rows], data.y[each.rows]), each.state)


def make_private_trainer(spec: ModelSpec, noise: dict[str, Any]) -> PrivateTrainer:
    """The trainer of a model. `noise`: `clip_norm`, `noise_multiplier` and `one_by_one` (`PrivateRuntime`)."""
    return PrivateTrainer(PrivateRuntime(spec.build(0), spec.loss, **noise))


def require_row_gradients(spec: ModelSpec | KerasSpec) -> str:
    """Why rows are differentiated one by one; empty if opacus does it at once.

    Raises:
        UserError: the model's rows have no gradients of their own.
    """
    refusal = f'privacy.mechanism = "example" cannot train model.name = {spec.name!r}: '
    if isinstance(spec, KerasSpec):
        raise UserError(f"{refusal}it is a Keras model, and the gradients of single rows are PyTorch's")
    module = spec.build(0)
    if layers := statistics(module):
        raise UserError(
            f"{refusal}{', '.join(layers[:3])} normalise by statistics of training rows, which no noise hides; take GroupNorm or LayerNorm, "
            'such as model.norm = "group" of resnet8'
        )
    if errors := ModuleValidator.validate(module, strict=False):
        return str(errors[0])
    try:
        runtime = PrivateRuntime(module, spec.loss, 1.0, 1.0, one_by_one=False)
        difference = _largest_difference(runtime, *spec.example_batch(_TRIAL_ROWS))
    except Exception as error:  # a layer, also of a user's code, may be beyond it in any way
        return f"{type(error).__name__}: {error}"
    return (
        "" if difference < _TOLERANCE else "its gradients of rows in a batch are not those of the rows alone"
    )


def _largest_difference(runtime: PrivateRuntime, x: torch.Tensor, y: torch.Tensor) -> float:
    """By how much the gradients of rows differ in a batch and alone, relative to the largest; 0 for a model that draws at random."""
    train_mode(runtime.module)
    with torch.no_grad():
        if not torch.equal(runtime.module(x), runtime.module(x)):
            runtime.row_gradients(x, y)
            return 0.0
    together = [gradients.clone() for gradients in runtime.row_gradients(x, y)]
    found = 0.0
    for at in range(len(y)):
        alone = runtime.row_gradients(x[at : at + 1], y[at : at + 1])
        for batch, single in zip(together, alone, strict=True):
            largest = max(float(batch.abs().max()), 1e-9)
            found = max(found, float((batch[at] - single[0]).abs().max()) / largest)
    return found
