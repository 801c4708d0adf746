"""DP-SGD on the rows of a client (Abadi 2016, Algorithm 1): its steps hide whether any one row is there.

Each step takes each row by itself with the same probability (`edge_client.train.schedule.poisson_batches`), scales its gradient down to a norm,
adds up, adds Gaussian noise, and divides by the number of rows expected. Opacus computes the gradients of all rows of a batch at once where it
can, clips them and adds them up; of other models each row is differentiated alone, which is always right and slower.

Simulations draw rows and noise from the task's seed. A device draws both from a source that nobody can predict (`make_private_trainer`): whoever
knows which rows a step takes gets more from it than the account says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn

from edge_client.data.examples import Examples
from edge_client.train import schedule
from edge_client.train.torch_trainer import Loss, TorchRuntime, statistics, train_mode
from edge_client.train.trainer import Trainer
from edge_client.wire.privacy import NoiseTask
from strategies.client_rules import Correction
from strategies.params import Params, Tensors
from strategies.privacy.central import ROUNDING
from strategies.privacy.noise.discrete import GRID_BITS, add_gaussian
from strategies.privacy.noise.secure import Floats, SecureSource, Source, draw_uniforms

TRIAL_ROWS = 3
"""Rows on which `find_obstacle` compares gradients."""

_TOLERANCE = 1e-3
_SEARCHED_ROWS = 1000


class PrivateRuntime(TorchRuntime):
    """PyTorch with noised gradients. It tells no training losses: they are 0.

    `clip_norm`: largest L2 norm of a row's gradient; `noise_multiplier`: standard deviation of the noise over it. `one_by_one`: rows are
    differentiated alone. `source`: of the noise; None: the seed of a task, which protects from nobody who knows it.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        clip_norm: float,
        noise_multiplier: float,
        one_by_one: bool,
        source: Source | None = None,
    ) -> None:
        super().__init__(module, loss)
        self._row_loss = loss
        self._sampled = None if one_by_one else GradSampleModule(module, loss_reduction="sum")
        self._clip_norm, self._noise_multiplier = clip_norm, noise_multiplier
        self._source = source
        self._expected_rows = 1
        self._optimizer: DPOptimizer | None = None

    def expect(self, rows: int) -> None:
        """Sets how many rows a batch has on average."""
        self._expected_rows = rows

    def take_steps(
        self, params: Tensors, batches: Iterable[Examples], lr: float, correction: Correction, seed: int
    ) -> tuple[Params, list[float]]:
        self._optimizer = self._make_optimizer(seed)
        return super().take_steps(params, batches, lr, correction, seed)

    def _make_optimizer(self, seed: int) -> DPOptimizer:
        weights = list(self._weights.values())
        unused = torch.optim.SGD(weights, lr=1.0)  # takes no step
        multiplier = self._noise_multiplier * ROUNDING
        norm, expected = self._clip_norm, self._expected_rows
        if self._source is not None:
            return _SecureOptimizer(self._source, unused, multiplier, norm, expected)
        # Independent of the order of the rows and of the randomness inside the model, which have the seed itself.
        noise_seed = int(np.random.default_rng([seed, 1]).integers(2**63))
        return DPOptimizer(
            unused,
            noise_multiplier=multiplier,
            max_grad_norm=norm,
            expected_batch_size=expected,
            generator=torch.Generator().manual_seed(noise_seed),
        )

    def _differentiate(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
        assert self._optimizer is not None  # `take_steps`
        self._optimizer.zero_grad()
        found = _drop_nonfinite(self.row_gradients(x, y))
        for weight, gradients in zip(self._weights.values(), found, strict=True):
            weight.grad_sample = gradients  # type: ignore[attr-defined]
        self._optimizer.pre_step()
        noised = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        return 0.0, noised

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


def _drop_nonfinite(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of rows [rows, …], where 0 stands for those of a row whose norm is not finite: no factor scales it down."""
    if not len(gradients[0]):
        return gradients
    norms = torch.stack([each.reshape(len(each), -1).norm(2, dim=-1) for each in gradients]).norm(2, dim=0)
    dropped = torch.nonzero(~torch.isfinite(norms)).flatten()
    return [each.index_fill(0, dropped, 0.0) for each in gradients] if len(dropped) else gradients


class _SecureOptimizer(DPOptimizer):  # type: ignore[misc]  # opacus has no types
    """Opacus' optimizer with discrete Gaussian noise from a source of words."""

    def __init__(
        self,
        source: Source,
        optimizer: torch.optim.Optimizer,
        noise_multiplier: float,
        clip_norm: float,
        expected_rows: int,
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_norm,
            expected_batch_size=expected_rows,
        )
        self._source = source
        values = sum(weight.numel() for weight in self.params)
        # Rounding to the grid may move two sums of d values apart by √d steps.
        longer = 1 + noise_multiplier * values**0.5 * 2.0 ** (1 - GRID_BITS)
        self._deviation = noise_multiplier * clip_norm * longer

    def add_noise(self) -> None:
        for weight in self.params:
            summed = weight.summed_grad.numpy().astype(np.float64)
            noised = add_gaussian(summed, self._deviation, self._source).astype(np.float32)
            weight.grad = torch.from_numpy(noised).view_as(weight)


@dataclass(frozen=True)
class _Uniforms:
    """Uniform values of a source of words, as `schedule.poisson_batches` takes them."""

    source: Source

    def random(self, size: int) -> Floats:
        return draw_uniforms(self.source, size)


@dataclass(frozen=True)
class UnpredictableBatches:
    """The order of `schedule.poisson_batches`, whose rows follow from no seed."""

    source: Source

    def __call__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        epochs: int | None,
        steps: int | None,
        rng: np.random.Generator,
    ) -> Iterator[schedule.Indices]:
        return schedule.poisson_batches(
            num_examples, batch_size, epochs=epochs, steps=steps, rng=_Uniforms(self.source)
        )


def make_private_trainer(
    module: nn.Module,
    loss: Loss,
    noise: NoiseTask,
    data: Examples,
    batch_size: int,
    source: Source | None = None,
) -> Trainer:
    """A device's trainer for its own rows `data`. `module`: as built. `source`: of rows and noise; default: the operating system."""
    source = source or SecureSource()
    rows = _choose_trial(data)
    one_by_one = rows is None or bool(find_obstacle(copy.deepcopy(module), loss, *rows))
    runtime = PrivateRuntime(module, loss, noise.clip_norm, noise.noise_multiplier, one_by_one, source)
    runtime.expect(min(batch_size, len(data)))
    return Trainer(runtime, UnpredictableBatches(source))


def _choose_trial(data: Examples) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows for `find_obstacle`, which all differ; None: there are too few of them. Numbers are drawn, whatever the data."""
    if data.x.dtype.kind == "f":
        if len(data) < TRIAL_ROWS:
            return None
        drawn = np.random.default_rng(0).standard_normal((TRIAL_ROWS, *data.x.shape[1:]))
        x: npt.NDArray[np.generic] = drawn.astype(data.x.dtype)
        return torch.from_numpy(x), torch.tensor(data.y[:TRIAL_ROWS])
    _, first = np.unique(data.x[:_SEARCHED_ROWS], axis=0, return_index=True)
    chosen = np.sort(first)[:TRIAL_ROWS]
    if len(chosen) < TRIAL_ROWS:
        return None
    return torch.tensor(data.x[chosen]), torch.tensor(data.y[chosen])


def find_refusal(module: nn.Module) -> str:
    """Why the model's rows have no gradients of their own; empty if they have."""
    if layers := statistics(module):
        return f"{', '.join(layers[:3])} normalise by statistics of training rows, which no noise hides; take GroupNorm or LayerNorm"
    return ""


def find_obstacle(module: nn.Module, loss: Loss, x: torch.Tensor, y: torch.Tensor) -> str:
    """Why rows are differentiated one by one; empty if opacus does it at once.

    `module`: gets opacus' hooks. `x`, `y`: a few rows, none like another.
    """
    if errors := ModuleValidator.validate(module, strict=False):
        return str(errors[0])
    try:
        difference = _largest_difference(PrivateRuntime(module, loss, 1.0, 1.0, one_by_one=False), x, y)
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
