"""From gradients to params: which optimizer a process runs over which params, and what it exchanges for that.

exchange   codes gradients on their way, or momenta (onebit)
zero=1     steps some of the params here, the others elsewhere
offload    puts its state, and param shards, into files
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models.pretrain import optimizers
from models.pretrain.data_parallel import exchange, offload, zero1
from models.pretrain.data_parallel.onebit import OneBitAdam
from models.pretrain.plan import PlanError
from models.pretrain.training import Options
from models.pretrain.world import World


def build(
    parts: Sequence[nn.Module], options: Options, world: World, steps: int
) -> list[torch.optim.Optimizer]:
    """The optimizers of `parts`, one each, in a training of `steps` steps.

    Raises:
        PlanError: the options do not go with the plan's exchange.
    """
    plan = world.plan
    if plan.offload == "disk":
        offload.map_params(parts)
    built = (
        [_shared(part, options, world, steps) for part in parts]
        if world.size("data") > 1 and plan.zero <= 1
        else optimizers.build(parts, options)
    )
    for part, optimizer in zip(parts, built, strict=True):
        if isinstance(part, DistributedDataParallel):
            exchange.register(part, optimizer, plan, steps)
        if plan.offload == "disk":
            offload.rest_after_steps(optimizer)
    return built


def _shared(part: nn.Module, options: Options, world: World, steps: int) -> torch.optim.Optimizer:
    """Over params that all processes of the data axis have."""
    parameters = [p for p in part.parameters() if p.requires_grad]
    if world.plan.exchange == "onebit":
        return _onebit(parameters, options, world, steps)
    if world.plan.zero == 1:
        return zero1.build(parameters, world.group("data"), lambda mine: optimizers.over(mine, options))
    return optimizers.over(parameters, options)


def _onebit(
    parameters: list[nn.Parameter], options: Options, world: World, steps: int
) -> torch.optim.Optimizer:
    wrong = [
        reason
        for reason, found in (
            (f"optimizer is {options.optimizer!r}, expected 'adamw'", options.optimizer != "adamw"),
            (
                f"clip_norm is {options.clip_norm}, expected 0: no process sees the whole gradient",
                options.clip_norm,
            ),
        )
        if found
    ]
    if wrong:
        raise PlanError(
            f"plan {world.plan}: exchange=onebit does not go with these options: {'; '.join(wrong)}"
        )
    return OneBitAdam(
        parameters,
        options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        warmup=exchange.warmup_steps(world.plan, steps),
        group=world.group("data"),
    )
