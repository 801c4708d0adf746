"""Data parallelism: how processes that compute different rows arrive at the same params.

zero=0  every process has everything; gradients are summed: by DistributedDataParallel, overlapped with the backward
        pass, where a process has the whole model; otherwise by `models.pretrain.parallel.data.gradient_sums`, likewise
zero=1  the same, and each process steps a part of the params (`models.pretrain.parallel.data.zero1`)
zero=2  gradients and optimizer state are sharded, params gathered once a step (FSDP2)
zero=3  params too, gathered layer by layer (FSDP2); they may be offloaded to host memory or to disk (`offload`)
sync_every  nothing is exchanged here: params are, every so many steps (`models.pretrain.parallel.data.local_updates`)

Losses are sums divided by the labels of the whole global batch, so gradients have to be summed. Torch averages them
(gloo has no scaled sum to avoid that), so losses are first multiplied by the size of the data axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from models.pretrain.parallel.data import buckets, host_memory, in_place
from models.pretrain.parallel.model import experts
from models.pretrain.parallel.model.stage import modules_in_order
from models.pretrain.world import World
from models.zoo.layout import Layout


def apply_data_parallel(module: nn.Module, layout: Layout | None, world: World) -> nn.Module:
    """Wraps `module` so that the processes of the data axis train it together."""
    plan = world.plan
    host_memory.return_blocks(plan.zero >= 2 and world.device.type == "cpu")
    if world.size("data") == 1 and plan.precision == "fp32" and plan.offload == "none":
        return module
    if plan.zero >= 2:
        return _apply_fsdp(module, layout, world)
    if uses_ddp(world):
        total = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
        return DistributedDataParallel(
            module, process_group=world.group("data"), bucket_cap_mb=buckets.limit(total) / 2**20
        )
    return module


def averages_gradients(world: World) -> bool:
    """Whether gradients, or params, are averaged, so that losses must be scaled to make it a sum."""
    return world.size("data") > 1 and (world.plan.zero >= 2 or world.plan.sync_every > 0 or uses_ddp(world))


def uses_ddp(world: World) -> bool:
    """Whether DistributedDataParallel handles the data axis."""
    plan = world.plan
    only_data = plan.tp == plan.pp == plan.ep == 1
    return world.size("data") > 1 and plan.zero < 2 and only_data and not plan.sync_every


def _apply_fsdp(module: nn.Module, layout: Layout | None, world: World) -> nn.Module:
    """Shards params over the shard and cp axes, or over the whole data axis where experts are on the shard axis: these
    are sharded over the replicate axis."""
    plan = world.plan
    hybrid = plan.replicate > 1 and plan.ep == 1
    mesh = world.mesh["replicate", "shard"] if hybrid else world.axis("data" if plan.ep > 1 else "fsdp")
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.zero == 3,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if plan.precision != "fp32" else None, reduce_dtype=torch.float32
        ),
        "offload_policy": OffloadPolicy()
        if plan.offload == "none"
        else CPUOffloadPolicy(pin_memory=world.device.type == "cuda" and plan.offload == "cpu"),
    }
    for part in experts.sharded([module]):
        fully_shard(part, **{**options, "mesh": world.axis("replicate")})
    for names in _gathered_together(module, layout):
        parts = [module.get_submodule(name) for name in names]
        fully_shard(parts if len(parts) > 1 else parts[0], **options)
    fully_shard(module, **options)
    if world.device.type == "cpu":
        in_place.use(module)
    return module


def _gathered_together(module: nn.Module, layout: Layout | None) -> list[list[str]]:
    """Paths of the modules whose params are gathered at once: each layer's, those of each module before the layers, and
    those of all after them. The rest is gathered with the whole module.

    Modules beside the layers are among the rest where they share params, or where the model may use theirs without
    calling them.
    """
    if layout is None or not layout.layers:
        return []
    layers = layout.layer_names(module)
    names = [] if layout.tied else modules_in_order(module, layout)
    first, last = (names.index(layers[0]), names.index(layers[-1])) if names else (0, -1)
    after = names[last + 1 :]
    return [*([name] for name in names[:first]), *([name] for name in layers), *([after] if after else [])]
