"""Optimizers over the parts of one process, learning-rate schedules, and clipping by the global norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from models.pretrain.training import Options as Options
from models.pretrain.world import World


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
