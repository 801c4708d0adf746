"""Optimizers of a training: over which params each runs, how gradients reach it, and clipping by the global norm.

grad_compression  compresses gradients, or momenta (onebit)
zero=1            steps some of the params on this process, the others elsewhere
offload           keeps optimizer state and param shards in files
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from models.pretrain.dtensor import local_tensor
from models.pretrain.parallel.data import grad_compression, offload, zero1
from models.pretrain.parallel.data.onebit import OneBitAdam
from models.pretrain.recovery.state import RankState
from models.pretrain.training import TrainingOptions
from models.pretrain.world import World


def build(
    parts: Sequence[nn.Module], options: TrainingOptions, world: World, steps: int
) -> tuple[list[torch.optim.Optimizer], RankState | None]:
    """The optimizers of `parts`, one each, for a training of `steps` steps, and the state of gradient compression.

    Raises:
        PlanError: the options conflict with the plan's gradient compression.
    """
    plan = world.plan
    if plan.offload == "disk":
        offload.map_params(parts)
    built = [_of(part, options, world, steps) for part in parts]
    rank_state: RankState | None = None  # only plans with a single part compress gradients
    for part, optimizer in zip(parts, built, strict=True):
        if isinstance(part, DistributedDataParallel):
            rank_state = grad_compression.register(part, optimizer, plan, steps)
        if plan.offload == "disk":
            offload.release_after_steps(optimizer)
    return built, rank_state


def _of(part: nn.Module, options: TrainingOptions, world: World, steps: int) -> torch.optim.Optimizer:
    plan, parameters = world.plan, [p for p in part.parameters() if p.requires_grad]
    if world.size("data") > 1 and plan.grad_compression == "onebit":
        return OneBitAdam(
            parameters,
            options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            warmup=grad_compression.warmup_steps(plan, steps),
            group=world.group("data"),
        )
    if world.size("data") > 1 and plan.zero == 1:
        return zero1.build(parameters, world.group("data"), lambda mine: over(mine, options))
    return over(parameters, options)


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


def over(parameters: list[nn.Parameter], options: TrainingOptions) -> torch.optim.Optimizer:
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
