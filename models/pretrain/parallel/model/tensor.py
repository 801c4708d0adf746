"""Tensor parallelism with DTensor: matrices split by attention head and feature, embedding and head by vocabulary
(Shoeybi 2019).

With `sequence`, activations between the matrices are split by sequence instead of replicated (Korthikanti 2022): from
the embedding to the head a process keeps [B, T/tp, D], and modules that hold split matrices gather [B, T, D] at their
input. With `loss_parallel` logits stay split by class, and so does their cross-entropy.

Any other module can be annotated (`models.zoo.layout.Operator`).

A vocabulary that tp does not divide is split unevenly: the first processes have one row more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from models.pretrain.plan import ParallelPlan
from models.pretrain.world import World
from models.zoo.layout import Layout, Operator, matching

SEQUENCE = Shard(1)
"""Split along T of [B, T, D]."""


def split(module: nn.Module, layout: Layout, plan: ParallelPlan, world: World) -> None:
    """Splits the matrices of `module`, a whole model or a stage of one, in place."""
    mesh = world.axis("tp")
    between: Placement = SEQUENCE if plan.sequence else Replicate()
    styles: dict[str, ParallelStyle] = {}

    def add(style: ParallelStyle, *patterns: str) -> None:
        styles.update((name, style) for name, _ in matching(module, patterns))

    add(Columns(), *layout.columns)
    add(Rows(output_layouts=between), *layout.rows)
    add(RowwiseParallel(input_layouts=Replicate()), layout.vocabulary)
    if plan.sequence:
        add(SequenceParallel(use_local_output=True), *layout.norms)
        # positions are added to whole sequences, so the embedding is unaware of the split
        add(PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=SEQUENCE), layout.order[0])
        for _, part in matching(module, _holders(layout.columns)):
            _gather_input(part, mesh)
        # what follows the layers has plain params, such as a head that is tied to the embedding
        for _, part in matching(module, tuple(_after_layers(layout)[:1])):
            _gather_input(part, mesh, local=True)
        # routers and experts are not split, so they need whole sequences too
        for _, part in matching(module, _holders(layout.experts)):
            _gather_input(part, mesh, local=True)
        add(
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=SEQUENCE),
            *_holders(layout.experts),
        )
    add(
        ColwiseParallel(
            input_layouts=Replicate() if _after_layers(layout) else between,
            output_layouts=Shard(-1) if plan.loss_parallel else Replicate(),
            use_local_output=not plan.loss_parallel,
        ),
        layout.head,
    )
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    parallelize_module(module, mesh, styles)
    for name in frozen:  # torch's SequenceParallel creates new params, which require gradients
        module.get_parameter(name).requires_grad_(False)
    if plan.sequence:
        for name, part in list(module.named_modules()):
            if type(part) is nn.Dropout and part.p:
                length = layout.length // world.size("cp")
                module.set_submodule(name, SequenceDropout(part.p, length, mesh))
    for path, operator in layout.operators.items():
        for _, part in matching(module, (path,)):
            _shard_operator(part, operator, mesh)


class Columns(ColwiseParallel):
    """A linear layer split by output, with its low-rank product if it has one (`models.zoo.adapted.LowRank`)."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(module, device_mesh, {"weight": 0, "bias": 0, "lora_b": 0})


class Rows(RowwiseParallel):
    """A linear layer split by input, with its low-rank product if it has one."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(module, device_mesh, {"weight": 1, "lora_a": 1})


def _distribute(module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int]) -> None:
    """Shards the params of `module` along `dims`, by name, and replicates the others."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        split = distribute_tensor(parameter, mesh, [_placement(dims.get(name))], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, parameter.requires_grad))


def problems(module: nn.Module, layout: Layout, plan: ParallelPlan) -> list[str]:
    """Why the dropout of `module` cannot follow `plan`: where the processes of the tp axis have different features, or
    parts of sequences, equal random numbers would drop the same elements of each."""
    if plan.tp == 1:
        return []
    holders = [f"{name}." for name, _ in matching(module, _holders(layout.columns))]
    problems = []
    for name, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            share = part.dropout
        else:
            share = part.p if isinstance(part, _DropoutNd) else 0.0
        if not share:
            continue
        if name.startswith(tuple(holders)):
            problems.append(
                f"tp splits what {name!r} drops from, and every process would drop the same places of its share: "
                "set its share to 0, or move it out of the module that holds the split matrices"
            )
        elif plan.sequence and type(part) is not nn.Dropout:
            problems.append(f"sequence needs nn.Dropout, but {name!r} is {type(part).__name__}")
    return problems


class SequenceDropout(nn.Dropout):
    """Dropout of a part of sequences, with this part of the mask that one process would draw for whole ones.

    Ranks that share sequences have equal random numbers, since what they compute of whole sequences must be equal.
    """

    def __init__(self, share: float, length: int, mesh: DeviceMesh) -> None:
        super().__init__(share)
        self.length, self.place = length, mesh.get_local_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.p) or x.dim() < 3 or x.shape[1] == self.length:
            return super().forward(x)
        tokens = x.shape[1]
        mask = F.dropout(x.new_ones(x.shape[0], self.length, *x.shape[2:]), self.p)
        return x * mask[:, self.place * tokens : (self.place + 1) * tokens]


def align_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Redistributes gradients like their params: those of norms that saw a part of the sequence are summed, those of
    a sharded table keep this process's rows."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _holders(patterns: Iterable[str]) -> tuple[str, ...]:
    """Paths of the parents of the modules in `patterns`."""
    return tuple(sorted({pattern.rpartition(".")[0] for pattern in patterns}))


def _after_layers(layout: Layout) -> list[str]:
    """The modules after the layers that are neither a norm nor the head."""
    layers = [place for place, path in enumerate(layout.order) if path.endswith(".*")]
    return [
        path
        for path in layout.order[max(layers, default=0) + 1 :]
        if path not in (*layout.norms, layout.head)
    ]


def _gather_input(module: nn.Module, mesh: DeviceMesh, local: bool = False) -> None:
    """Gathers the whole sequences of the first input of `module`, [B, T/tp, D]; its gradient is scattered again.

    Args:
        local: gather a plain tensor, because the module's params are plain.
    """

    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        part = DTensor.from_local(inputs[0], mesh, (SEQUENCE,), run_check=False)
        full = part.redistribute(placements=(Replicate(),))
        return (full.to_local() if local else full, *inputs[1:])

    module.register_forward_pre_hook(gather)


def _shard_operator(module: nn.Module, operator: Operator, mesh: DeviceMesh) -> None:
    """Shards one module by its annotation, in place: params, inputs and output become DTensors, whose rules derive the
    computation and whose redistributions are the collectives (Xu 2021, GSPMD).
    """
    for path, parameter in list(module.named_parameters()):
        holder, _, name = path.rpartition(".")
        split = distribute_tensor(
            parameter.detach(), mesh, [_placement(operator.params.get(path))], src_data_rank=None
        )
        module.get_submodule(holder).register_parameter(name, nn.Parameter(split, parameter.requires_grad))

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        dims = operator.inputs + (None,) * (len(inputs) - len(operator.inputs))
        return tuple(_placed(x, dim, mesh) for x, dim in zip(inputs, dims, strict=False))

    def leave(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        placed = _placed(output, operator.output, mesh)
        return placed.to_local() if operator.output is None and isinstance(placed, DTensor) else placed

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _placed(x: Any, dim: int | None, mesh: DeviceMesh) -> Any:
    """`x` sharded along `dim`, or replicated; plain tensors count as replicated, other values are unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    tensor = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return tensor.redistribute(placements=[_placement(dim, x.dim())])


def _placement(dim: int | None, dims: int = 0) -> Placement:
    if dim is None:
        return Replicate()
    return Shard(dim + dims if dim < 0 else dim)
