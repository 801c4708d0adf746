"""The training objective: the summed loss of the labels that count, which micro-batches and processes add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from models.labels import PADDING, are_quantities, counting
from models.pretrain.dtensor import full_tensor
from models.zoo.spec import ModelSpec, masked_cross_entropy

Objective = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def objective_of(spec: ModelSpec) -> Objective:
    """(logits [B, (T,) C], labels [B, (T)]) -> summed loss. A model's own loss is a mean and is scaled back to a sum."""
    if spec.loss is masked_cross_entropy:
        return summed_cross_entropy

    def summed(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counted = counting(y).sum()
        logits = full_tensor(logits)  # they may be split by class
        # without a counted label the mean is 0 / 0; times 0 it would still be NaN
        return spec.loss(logits, y) * counted if counted else logits.sum() * 0

    return summed


def as_targets(y: torch.Tensor) -> torch.Tensor:
    """Labels as losses take them: quantities as they are, classes as int64."""
    return y if are_quantities(y) else y.long()


def summed_cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32, summed over labels that are not `PADDING`."""
    return full_tensor(  # the loss of split logits is split
        F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), ignore_index=PADDING, reduction="sum")
    )


def router_losses(parts: Sequence[nn.Module]) -> Callable[[float], None]:
    """Sets what the losses of routers in `parts` count for in a row (`models.zoo.layout.Layout.balance`)."""
    balances = [module for part in parts for module in part.modules() if hasattr(module, "row_weight")]

    def weigh(row_weight: float) -> None:
        for balance in balances:
            setattr(balance, "row_weight", row_weight)  # noqa: B010

    return weigh
