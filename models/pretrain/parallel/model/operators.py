"""Single operators sharded by annotation (`models.zoo.layout.Operator`): params, inputs and output become DTensors,
whose rules derive the computation and whose redistributions are the collectives (Xu 2021, GSPMD).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from models.zoo.layout import Operator


def shard_operator(module: nn.Module, operator: Operator, mesh: DeviceMesh) -> None:
    """Shards `module` over `mesh`, of one axis, in place."""
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
