"""Tensor parallelism: matrices split by attention head and feature, embedding and head by vocabulary (Shoeybi 2019),
by DTensor.

With `sequence`, what lies between the matrices is split by sequence instead of repeated (Korthikanti 2022): from the
embedding to the head a process keeps [B, T/tp, D], and modules that hold split matrices gather [B, T, D] at their
entrance. With `loss_parallel` logits stay split by class, and so does their cross-entropy.

Any other module can be told where its tensors lie: see `models.pretrain.model_parallel.operators`.

A vocabulary that tp does not divide is split unevenly: the first processes have a row more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.pretrain.model_parallel import operators
from models.pretrain.plan import ParallelPlan
from models.pretrain.world import World
from models.zoo.layout import Layout, matching

SEQUENCE = Shard(1)
"""Of [B, T, D]."""


def split(module: nn.Module, layout: Layout, plan: ParallelPlan, world: World) -> None:
    """Splits the matrices of `module`, a whole model or a stage of one, in place."""
    mesh = world.axis("tp")
    between: Placement = SEQUENCE if plan.sequence else Replicate()
    styles: dict[str, ParallelStyle] = {}

    def give(style: ParallelStyle, *patterns: str) -> None:
        styles.update((name, style) for name, _ in matching(module, patterns))

    give(ColwiseParallel(), *layout.columns)
    give(RowwiseParallel(output_layouts=between), *layout.rows)
    give(RowwiseParallel(input_layouts=Replicate()), layout.vocabulary)
    if plan.sequence:
        give(SequenceParallel(use_local_output=True), *layout.norms)
        # positions are added to whole sequences, so that the embedding need not know of the split
        give(
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=SEQUENCE), layout.order[0]
        )
        for _, found in matching(module, (*_holders(layout.columns), *_after_layers(layout)[:1])):
            _gather_input(found, mesh)
        # routers and experts are whole, so that they have to see whole sequences too
        for _, found in matching(module, _holders(layout.experts)):
            _gather_input(found, mesh, local=True)
        give(
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=SEQUENCE),
            *_holders(layout.experts),
        )
    give(
        ColwiseParallel(
            input_layouts=Replicate() if _after_layers(layout) else between,
            output_layouts=Shard(-1) if plan.loss_parallel else Replicate(),
            use_local_output=not plan.loss_parallel,
        ),
        layout.head,
    )
    parallelize_module(module, mesh, styles)
    for path, operator in layout.operators.items():
        for _, found in matching(module, (path,)):
            operators.spread(found, operator, mesh)


def settle(parts: Iterable[nn.Module]) -> None:
    """Gives gradients the split of their params: those of norms that saw a part of the sequence are added up, those of
    a table of which a process has some rows lose the others."""
    for part in parts:
        for parameter in part.parameters():
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)


def _holders(patterns: Iterable[str]) -> tuple[str, ...]:
    """Paths of the modules that have those of `patterns` as children."""
    return tuple(sorted({pattern.rpartition(".")[0] for pattern in patterns}))


def _after_layers(layout: Layout) -> list[str]:
    """What follows the layers and is neither a norm nor the head."""
    layers = [place for place, path in enumerate(layout.order) if path.endswith(".*")]
    return [
        path
        for path in layout.order[max(layers, default=0) + 1 :]
        if path not in (*layout.norms, layout.head)
    ]


def _gather_input(module: nn.Module, mesh: DeviceMesh, local: bool = False) -> None:
    """Has `module` see the whole sequences of its first input [B, T/tp, D]; its gradient is scattered again.

    Args:
        local: as a plain tensor, because its params are.
    """

    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        part = DTensor.from_local(inputs[0], mesh, (SEQUENCE,), run_check=False)
        whole = part.redistribute(placements=(Replicate(),))
        return (whole.to_local() if local else whole, *inputs[1:])

    module.register_forward_pre_hook(gather)
