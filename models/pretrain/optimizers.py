"""Optimizers over the parts of one process, and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from models.pretrain.dtensor import local_tensor
from models.pretrain.training import Options
from models.pretrain.world import World


def build(parts: Iterable[nn.Module], options: Options) -> list[torch.optim.Optimizer]:
    """One optimizer for every part."""
    return [over([p for p in part.parameters() if p.requires_grad], options) for part in parts]


def clip(parts: Iterable[nn.Module], max_norm: float, world: World) -> torch.Tensor:
    """Scales gradients so that the norm of the whole model's is at most `max_norm`; returns the norm before.

    `torch.nn.utils.clip_grad_norm_` rejects gradients of which some are sharded, or sharded over different processes.
    """
    gradients = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
    local = [local_tensor(gradient) for gradient in gradients]
    squares = _sum_of_squares(gradients, local, world.device)
    if world.size("pp") > 1:
        dist.all_reduce(squares, group=world.group("pp"))
    norm = squares.sqrt()
    torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _sum_of_squares(
    gradients: Sequence[torch.Tensor], local: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Sum of the squares of `gradients`, of which this process has `local`. Gradients sharded over the same processes
    are summed in one exchange; replicated ones count once."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient, mine in zip(gradients, local, strict=True):
        by_groups.setdefault(_sharding_groups(gradient), []).append(mine)
    total = torch.zeros((), device=device)
    for groups, tensors in by_groups.items():
        norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
        squares = torch.stack(norms).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    return total


def _sharding_groups(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    axes = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(gradient.device_mesh.get_group(axis) for axis in axes)


def over(parameters: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    """The optimizer that `options` name, over these params; there may be none."""
    groups = [{"params": parameters}]
    mixed = len({p.device_mesh if isinstance(p, DTensor) else None for p in parameters}) > 1
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            groups,
            options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            foreach=False if mixed else None,
        )
    fused = bool(parameters) and all(p.is_cuda for p in parameters) and not mixed
    return torch.optim.AdamW(
        groups,
        options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=fused or None,
        foreach=None if fused or not mixed else False,
    )
