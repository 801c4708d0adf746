"""Gradient inversion by optimisation: rows are sought whose gradient points where the update points.

    min over x of  1 - ⟨∇L(x, y), g⟩ / (‖∇L(x, y)‖ ‖g‖) + α TV(x),     g = -Δ

with Adam on signed gradients, within the range of values that rows have. Geiping 2020, equation 4 and section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from edge_client.train import torch_trainer
from models.zoo import ModelSpec
from strategies.params import Params

if TYPE_CHECKING:
    from coordinator.workers.audit.inversion import Known

_VARIATION = 1e-3
"""Weight of the total variation of images; rows of tables have no neighbours."""
_RATE = 0.05
"""Of Adam, as a share of each value's range."""
_DECAYS = (3 / 8, 5 / 8, 7 / 8)
"""Shares of the iterations after which the rate falls to a tenth."""


def match(spec: ModelSpec, known: Known, delta: Params, labels: list[int]) -> npt.NDArray[np.float32]:
    """Reconstructed rows [n, …]: as many as there are labels. Without labels they are sought too."""
    module = spec.build(0)
    torch_trainer.load(module, known.params)
    module.eval()
    weights = {name: each for name, each in module.named_parameters() if name in delta}
    direction = [torch.from_numpy(-np.array(delta[name], np.float32)) for name in weights]
    rng = torch.Generator().manual_seed(known.seed)
    return _descend(module, spec, list(weights.values()), direction, known, labels, rng).numpy()


def _descend(
    module: torch.nn.Module,
    spec: ModelSpec,
    weights: list[torch.nn.Parameter],
    direction: list[torch.Tensor],
    known: Known,
    labels: list[int],
    rng: torch.Generator,
) -> torch.Tensor:
    """The rows of the least cost, from a random start."""
    low, high = torch.from_numpy(known.low.copy()), torch.from_numpy(known.high.copy())
    count, span = len(labels) or known.rows, high - low
    # In units of the range, so that one rate fits all values.
    unit = torch.rand((count, *spec.input_shape), generator=rng).requires_grad_()
    y = torch.tensor(labels, dtype=torch.int64) if labels else torch.zeros(count).requires_grad_()
    sought = [unit] if labels else [unit, y]
    optimizer = torch.optim.Adam(sought, lr=_RATE)
    milestones = [int(share * known.iterations) for share in _DECAYS]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)
    variation = _VARIATION if len(spec.input_shape) in (2, 3) else 0.0
    best, found = float("inf"), unit.detach().clone()
    for _ in range(known.iterations):
        loss = spec.loss(module(low + unit * span), y)
        gradients = torch.autograd.grad(
            loss, weights, create_graph=True, allow_unused=True, materialize_grads=True
        )
        cost = _distance(gradients, direction) + variation * _total_variation(unit)
        for each, gradient in zip(sought, torch.autograd.grad(cost, sought), strict=True):
            each.grad = gradient.sign()
        value = float(cost.detach())
        if value < best:
            best, found = value, unit.detach().clone()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            unit.clamp_(0, 1)
    return low + found * span


def _distance(gradients: tuple[torch.Tensor, ...], direction: list[torch.Tensor]) -> torch.Tensor:
    """One minus the cosine between two lists of tensors."""
    pairs = list(zip(gradients, direction, strict=True))
    product = torch.stack([(a * b).sum() for a, b in pairs]).sum()
    squares = [torch.stack([each.square().sum() for each in side]).sum() for side in (gradients, direction)]
    return 1 - product / (squares[0] * squares[1]).sqrt().clamp(min=1e-30)


def _total_variation(x: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference between neighbouring pixels, the last two axes."""
    return x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
