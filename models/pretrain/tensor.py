"""Tensor parallelism: matrices split by attention head and feature (Shoeybi 2019), by DTensor.

With `sequence`, what lies between the matrices is split by sequence instead of repeated (Korthikanti 2022); with
`loss_parallel` logits stay split by class, and so does their cross-entropy.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from models.pretrain.plan import ParallelPlan
from models.pretrain.world import World
from models.zoo.layout import Layout, matching


def split(module: nn.Module, layout: Layout, plan: ParallelPlan, world: World) -> None:
    """Splits the matrices of `module` in place."""
    styles: dict[str, ParallelStyle] = {}
    for name, _ in matching(module, layout.columns):
        styles[name] = ColwiseParallel()
    for name, _ in matching(module, layout.rows):
        styles[name] = RowwiseParallel()
    if plan.loss_parallel:
        for name, _ in matching(module, (layout.head,)):
            styles[name] = ColwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
            )
    parallelize_module(module, world.axis("tp"), styles)
