"""Optimizers of a training: over which params each runs, how gradients reach it, and clipping by the global norm.

grad_compression  compresses gradients, or momenta (onebit)
zero=1            steps some of the params on this process, the others elsewhere
offload           keeps optimizer state and param shards in files
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from models.pretrain.dtensor import local_tensor
from models.pretrain.parallel.data import grad_compression, offload, zero1
from models.pretrain.parallel.data.onebit import OneBitAdam
from models.pretrain.parallel.model import experts
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
    undecayed = without_decay(part, options)
    if world.size("data") > 1 and plan.grad_compression == "onebit":
        return OneBitAdam(
            groups(parameters, options, undecayed),
            options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            warmup=grad_compression.warmup_steps(plan, steps),
            group=world.group("data"),
        )
    if world.size("data") > 1 and plan.zero == 1:
        of_experts = {id(p) for each in experts.sharded([part]) for p in each.parameters()}
        own = [p for p in parameters if id(p) in of_experts]  # stepped wherever they are
        shared = [p for p in parameters if id(p) not in of_experts]
        return zero1.build(shared, world.group("data"), lambda mine: over([*mine, *own], options, undecayed))
    return over(parameters, options, undecayed)


def without_decay(module: nn.Module, options: TrainingOptions) -> frozenset[int]:
    """The `id` of every param of `module` that weight decay leaves out, as `options.no_decay` says.

    Vectors do not take part in products that decay would keep small (Radford 2018, section 4.1; Loshchilov 2019).
    """
    if options.no_decay == "none":
        return frozenset()
    vectors = {id(p) for name, p in module.named_parameters() if p.dim() <= 1 or name.endswith("bias")}
    if options.no_decay == "vectors":
        return frozenset(vectors)
    tables = (part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))
    return frozenset(vectors | {id(table.weight) for table in tables})


def groups(
    parameters: Sequence[nn.Parameter], options: TrainingOptions, undecayed: Collection[int]
) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer: params that decay, and those that do not. At least one, perhaps empty."""
    decayed = [p for p in parameters if id(p) not in undecayed]
    rest = [p for p in parameters if id(p) in undecayed]
    found = [{"params": decayed, "weight_decay": options.weight_decay}] if decayed or not rest else []
    return [*found, {"params": rest, "weight_decay": 0.0}] if rest else found


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


def over(
    parameters: list[nn.Parameter], options: TrainingOptions, undecayed: Collection[int] = ()
) -> torch.optim.Optimizer:
    """The optimizer that `options` name, over these params; there may be none. `undecayed`: as `without_decay`."""
    parts = groups(parameters, options, undecayed)
    mixed = len({p.device_mesh if isinstance(p, DTensor) else None for p in parameters}) > 1
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            parts,
            options.lr,
            momentum=options.momentum,
            foreach=False if mixed else None,
        )
    fused = bool(parameters) and all(p.is_cuda for p in parameters) and not mixed
    return torch.optim.AdamW(
        parts,
        options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=fused or None,
        foreach=None if fused or not mixed else False,
    )
