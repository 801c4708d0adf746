"""Optimizers over the parts of one process, learning-rate schedules, and clipping by the global norm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from models.options import bounded
from models.pretrain.world import World


@dataclass(frozen=True)
class Options:
    """How to train.

    Attributes:
        epochs: over the training set, where `steps` is 0.
        steps: global batches.
        batch_size: rows of a global batch, shared by all dp ranks.
        warmup: steps over which the learning rate rises from 0.
        decay: what becomes of it afterwards: stays, or falls to a tenth along a line or half a cosine.
        clip_norm: largest norm of the whole gradient; 0: any.
        shift: images are moved by up to this many pixels, anew in every epoch; 0 leaves them as they are.
    """

    epochs: int = bounded(150, 1, 100_000)
    steps: int = bounded(0, 0, 100_000_000)
    batch_size: int = bounded(30, 1, 1_000_000)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = bounded(4e-3, 0.0, 1e3)
    weight_decay: float = bounded(0.01, 0.0, 1e3)
    momentum: float = bounded(0.9, 0.0, 1.0)
    beta1: float = bounded(0.9, 0.0, 1.0)
    beta2: float = bounded(0.999, 0.0, 1.0)
    eps: float = bounded(1e-8, 0.0, 1.0)
    warmup: int = bounded(0, 0, 100_000_000)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    clip_norm: float = bounded(0.0, 0.0, 1e6)
    shift: int = bounded(0, 0, 64)

    def steps_of(self, steps_per_epoch: int) -> int:
        """Global batches in all."""
        return self.steps or self.epochs * steps_per_epoch

    def rate(self, step: int, steps: int) -> float:
        """Learning rate at `step`, counted from 0, of `steps`."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        progress = (step - self.warmup) / max(1, steps - self.warmup)
        if self.decay == "linear":
            return self.lr * (1 - 0.9 * progress)
        if self.decay == "cosine":
            return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        return self.lr


def build(parts: Iterable[nn.Module], options: Options) -> list[torch.optim.Optimizer]:
    """One optimizer a part."""
    return [_of([p for p in part.parameters() if p.requires_grad], options) for part in parts]


def clip(parts: Iterable[nn.Module], largest: float, world: World) -> torch.Tensor:
    """Scales gradients so that the norm of the whole model's is at most `largest`; gives what it was."""
    gradients = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
    alike: dict[object, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    squares = torch.zeros((), device=world.device)
    for group in alike.values():
        norm = torch.nn.utils.get_total_norm(group)
        squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    if world.size("pp") > 1:
        dist.all_reduce(squares, group=world.group("pp"))
    norm = squares.sqrt()
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(scale)
    return norm


def _of(parameters: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    mixed = len({p.device_mesh if isinstance(p, DTensor) else None for p in parameters}) > 1
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            foreach=False if mixed else None,
        )
    fused = all(p.is_cuda for p in parameters) and not mixed
    return torch.optim.AdamW(
        parameters,
        options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=fused or None,
        foreach=None if fused or not mixed else False,
    )
