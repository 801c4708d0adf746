"""Short trainings in between: what distilling, pruning and quantizing do so that a changed model finds its accuracy again.

AdamW on one process; a model here is small enough. Steps differ in what they minimise (`objective`) and in what they do to the
weights after every step (`after_step`: masks, proximal steps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from models.options import bounded
from models.pretrain.data.batches import global_batches, shifted

Objective = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""(module, x, y) -> scalar loss."""
OnEpoch = Callable[[int, float], None]


@dataclass(frozen=True)
class Tuning:
    """How to train.

    Attributes:
        shift: images are moved by up to this many pixels.
        freeze: parameters whose name begins with one of these, separated by commas, stay as they are.
    """

    epochs: int = bounded(10, 0, 100_000)
    batch_size: int = bounded(16, 1, 1_000_000)
    lr: float = bounded(1e-3, 0.0, 1e3)
    weight_decay: float = bounded(0.01, 0.0, 1e3)
    shift: int = bounded(0, 0, 64)
    freeze: str = ""


def tune(
    module: nn.Module,
    x: npt.NDArray[Any],
    y: npt.NDArray[np.int32],
    options: Tuning,
    rng: np.random.Generator,
    objective: Objective,
    *,
    also: Iterable[nn.Parameter] = (),
    after_step: Callable[[int], None] = lambda step: None,
    on_epoch: OnEpoch = lambda epoch, loss: None,
) -> list[float]:
    """Trains `module` in place, which is left in evaluation mode, and gives the loss of every step.

    Args:
        x: [N, …]; y: int32 [N] or [N, T].
        also: learnt along, such as of a layer that only the objective has.
        after_step: told the number of the step, from 1, after the optimizer's.
    """
    frozen = tuple(prefix.strip() for prefix in options.freeze.split(",") if prefix.strip())
    learnt = [p for name, p in module.named_parameters() if not (frozen and name.startswith(frozen))]
    optimizer = torch.optim.AdamW([*learnt, *also], options.lr, weight_decay=options.weight_decay)
    module.train()
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))  # dropout, where the module has it
        for epoch in range(1, options.epochs + 1):
            before = len(losses)
            for batch in global_batches(len(x), options.batch_size, rng):
                moved = torch.from_numpy(shifted(x[batch], options.shift, rng))
                loss = objective(module, moved, torch.from_numpy(y[batch]))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(float(loss.detach()))
                after_step(len(losses))
            on_epoch(epoch, float(np.mean(losses[before:])))
    module.eval()
    return losses
