"""Data parallelism: how processes that compute different rows come to the same params.

zero=0  every process has all; gradients are summed: by DistributedDataParallel, overlapped with the backward pass,
        where a process has the whole model, by `GradientSum` after it otherwise
zero=2  gradients and optimizer state are shared out, params gathered once a step (FSDP2)
zero=3  params too, gathered layer by layer (FSDP2)

Losses are sums divided by the labels of the whole global batch, so gradients have to be summed. Torch averages them
(gloo has no scaled sum that would let it do otherwise), so losses are multiplied by the size of the data axis first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from models.pretrain.world import World
from models.zoo.layout import Layout

BUCKET_BYTES = 25 * 1024 * 1024


def share_out(module: nn.Module, layout: Layout | None, world: World) -> nn.Module:
    """`module` so that the processes of the data axis train it together."""
    plan = world.plan
    if world.size("data") == 1 and plan.precision == "fp32":
        return module
    if plan.zero >= 2:
        return _fully_sharded(module, layout, world)
    if replicated(world):
        return DistributedDataParallel(module, process_group=world.group("data"))
    return module


def averages(world: World) -> bool:
    """Whether torch averages the gradients, so that losses must be multiplied to make it a sum."""
    return world.size("data") > 1 and (world.plan.zero >= 2 or replicated(world))


def replicated(world: World) -> bool:
    """Whether DistributedDataParallel does it all."""
    plan = world.plan
    return world.size("data") > 1 and plan.zero < 2 and plan.tp == plan.pp == plan.ep == 1


def sum_gradients(parts: Iterable[nn.Module], world: World) -> None:
    """Sums gradients over the data axis, in buckets, where nothing did that during the backward pass."""
    if world.size("data") == 1 or averages(world):
        return
    group, bucket, size = world.group("data"), [], 0
    for part in parts:
        for parameter in part.parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            bucket.append(local)
            size += local.numel() * local.element_size()
            if size >= BUCKET_BYTES:
                _sum(bucket, group)
                bucket, size = [], 0
    _sum(bucket, group)


def _sum(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    if tensors:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=group)
        sums = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, summed in zip(tensors, sums, strict=True):
            tensor.copy_(summed.view_as(tensor))


def _fully_sharded(module: nn.Module, layout: Layout | None, world: World) -> nn.Module:
    plan = world.plan
    mesh = world.mesh["replicate", "shard"] if plan.replicate > 1 else world.axis("kept")
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.zero == 3,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if plan.precision == "bf16" else None, reduce_dtype=torch.float32
        ),
    }
    layers = layout.layer_names(module) if layout is not None and layout.layers else []
    for name in layers:
        fully_shard(module.get_submodule(name), **options)
    fully_shard(module, **options)
    return module
