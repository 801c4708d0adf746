"""The training loop of the datacenter: plain supervised epochs, unaware of how gradients are exchanged.

The module may be wrapped in DistributedDataParallel. It averages gradients over ranks, so each rank's loss
is scaled to make that average the gradient of the mean over the global batch, also where a batch does not
split evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from models.job import JobError, bounded
from models.pretrain.batches import Share, global_batches, shifted
from models.zoo import ModelSpec
from models.zoo.spec import Loss

OnEpoch = Callable[[int, float], None]

EVALUATION_ROWS = 256


@dataclass(frozen=True)
class Options:
    """How to train.

    Attributes:
        batch_size: of the global batch, split over the ranks.
        shift: images are moved by up to this many pixels, anew in every epoch; 0 leaves them as they are.
    """

    epochs: int = bounded(150, 1, 100_000)
    batch_size: int = bounded(30, 1, 1_000_000)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = bounded(4e-3, 0.0, 1e3)
    weight_decay: float = bounded(0.01, 0.0, 1e3)
    momentum: float = bounded(0.9, 0.0, 1.0)
    shift: int = bounded(0, 0, 64)


def train(
    module: nn.Module,
    loss: Loss,
    x: npt.NDArray[Any],
    y: npt.NDArray[np.int32],
    options: Options,
    rng: np.random.Generator,
    *,
    share: Share,
    device: torch.device,
    on_epoch: OnEpoch,
) -> list[float]:
    """Trains `module` in place and gives the loss of every step, averaged over the global batch.

    Args:
        loss: mean per counted label.
        rng: of batches and shifts; alike on all ranks.
        on_epoch: called after each epoch, counted from 1, with its mean loss.
    """
    optimizer = optimizer_of(module, options)
    module.train()
    curve: list[float] = []
    for epoch in range(1, options.epochs + 1):
        shares = []
        for batch in global_batches(len(x), options.batch_size, rng):
            x_batch, y_batch = shifted(x[batch], options.shift, rng), y[batch]
            mine, weight = share.rows(len(batch)), share.weight(y_batch)
            logits = module(torch.from_numpy(x_batch[mine]).to(device))
            # without a counted label the mean is 0 / 0; times 0 it would still be NaN
            part = (
                loss(logits, torch.from_numpy(y_batch[mine]).to(device)) * weight
                if weight
                else logits.sum() * 0
            )
            optimizer.zero_grad()
            (part * share.world_size).backward()
            optimizer.step()
            shares.append(part.detach())
        losses = _summed(torch.stack(shares), share)
        curve += losses
        on_epoch(epoch, sum(losses) / len(losses))
    return curve


def optimizer_of(module: nn.Module, options: Options) -> torch.optim.Optimizer:
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            module.parameters(), options.lr, momentum=options.momentum, weight_decay=options.weight_decay
        )
    return torch.optim.AdamW(module.parameters(), options.lr, weight_decay=options.weight_decay)


def evaluate(
    module: nn.Module, spec: ModelSpec, x: npt.NDArray[Any], y: npt.NDArray[np.int32], device: torch.device
) -> dict[str, float]:
    """`test_loss` and `test_accuracy` on all rows."""
    logits = logits_of(module, x, device)
    metrics = spec.metrics(logits, torch.from_numpy(y))
    return {"test_loss": metrics["loss"], "test_accuracy": metrics["accuracy"]}


def logits_of(module: nn.Module, x: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """[N, (T,) classes] on the CPU; the module is left in evaluation mode."""
    module.eval()
    with torch.inference_mode():
        return torch.cat(
            [
                module(torch.from_numpy(x[start : start + EVALUATION_ROWS]).to(device)).cpu()
                for start in range(0, len(x), EVALUATION_ROWS)
            ]
        )


def require_images(x: npt.NDArray[Any], shift: int, where: object) -> None:
    """Checks that shifting makes sense for `x`.

    Raises:
        JobError: the examples are no images of float32 pixels.
    """
    if shift and (x.ndim not in (3, 4) or x.dtype != np.float32):
        raise JobError(
            f"{where}: options.shift is {shift}, but examples of shape {x.shape[1:]} are no images; use 0"
        )


def _summed(parts: torch.Tensor, share: Share) -> list[float]:
    """Sums over ranks: one exchange an epoch."""
    if share.world_size > 1:
        dist.all_reduce(parts)
    return [float(value) for value in parts.cpu()]
