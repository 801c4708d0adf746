"""Optimizers of a training: over which params each runs, and how gradients reach it.

grad_compression  compresses gradients, or momenta (onebit)
zero=1            steps some of the params on this process, the others elsewhere
offload           keeps optimizer state and param shards in files
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models.pretrain import optimizers
from models.pretrain.parallel.data import grad_compression, offload, zero1
from models.pretrain.parallel.data.onebit import OneBitAdam
from models.pretrain.training import Options
from models.pretrain.world import World

if TYPE_CHECKING:
    from models.pretrain.recovery.state import RankState


def build(
    parts: Sequence[nn.Module], options: Options, world: World, steps: int
) -> tuple[list[torch.optim.Optimizer], RankState | None]:
    """The optimizers of `parts`, one each, for a training of `steps` steps, and the state of gradient compression.

    Raises:
        PlanError: the options conflict with the plan's gradient compression.
    """
    plan = world.plan
    if plan.offload == "disk":
        offload.map_params(parts)
    built = (
        [_shared(part, options, world, steps) for part in parts]
        if world.size("data") > 1 and plan.zero <= 1
        else optimizers.build(parts, options)
    )
    rank_state: RankState | None = None  # only plans with a single part compress gradients
    for part, optimizer in zip(parts, built, strict=True):
        if isinstance(part, DistributedDataParallel):
            rank_state = grad_compression.register(part, optimizer, plan, steps)
        if plan.offload == "disk":
            offload.release_after_steps(optimizer)
    return built, rank_state


def _shared(part: nn.Module, options: Options, world: World, steps: int) -> torch.optim.Optimizer:
    """An optimizer of params that all processes of the data axis have."""
    parameters = [p for p in part.parameters() if p.requires_grad]
    if world.plan.grad_compression == "onebit":
        return OneBitAdam(
            parameters,
            options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            warmup=grad_compression.warmup_steps(world.plan, steps),
            group=world.group("data"),
        )
    if world.plan.zero == 1:
        return zero1.build(parameters, world.group("data"), lambda mine: optimizers.over(mine, options))
    return optimizers.over(parameters, options)
