"""Gives the shards of a process their memory and initial values: those that every process would have of the whole model.

    whole module on meta -> split, sharded (`models.pretrain.parallelize`) -> allocate -> fill, one tensor at a time

Values come from a file of params, of which only the process's slices are read, or from a replay of the constructor. A
process holds its share and one whole tensor, or the tensors of one module where an initialiser needs several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from models.pretrain.deferred.recording import Deliver, Recorded, Ref, Unrecordable, held_tensors, record
from models.pretrain.dtensor import box_of, local_tensor
from models.pretrain.parallel.model.stage import modules_in_order
from models.pretrain.params import FromParams, unwrapped_name
from models.pretrain.plan import ParallelPlan
from models.zoo.spec import ModelSpec


def shards_params(plan: ParallelPlan) -> bool:
    """Whether a process keeps only a part of the params."""
    return plan.pp > 1 or plan.tp > 1 or plan.ep > 1 or (plan.zero >= 2 and plan.processes > 1)


def without_memory(spec: ModelSpec, plan: ParallelPlan) -> tuple[Recorded | None, str]:
    """The model of `spec` on the meta device, if under `plan` a process keeps a part of it; or why it cannot be there."""
    if not shards_params(plan):
        return None, ""
    constructor = spec.module.constructor if isinstance(spec.module, FromParams) else spec.module
    try:
        if spec.layout is None:
            raise Unrecordable("it has no layout")
        recorded = record(constructor)
        if plan.pp > 1 and not modules_in_order(recorded.module, spec.layout):
            raise Unrecordable("that its stages are what it computes must be checked with values")
    except Unrecordable as reason:
        return None, f"every process builds the whole model {spec.name!r} before it keeps its share: {reason}"
    return recorded, ""


def materialize(
    parts: Sequence[nn.Module], recorded: Recorded, spec: ModelSpec, seed: int, device: torch.device
) -> None:
    """Allocates the tensors of `parts`, which are on the meta device, on `device`, and fills them as
    `spec.build(seed)` does."""
    given = spec.module if isinstance(spec.module, FromParams) else None
    fills: dict[int, list[Callable[[Callable[[Ref], torch.Tensor]], None]]] = {}
    tensors = {name: tensor for part in parts for name, tensor in _allocated(part, device).items()}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if given is not None and name in given.names:
                local_tensor(tensor).copy_(given.source.read(name, box_of(tensor)))
            else:
                fills.setdefault(recorded.refs[name].storage, []).append(
                    partial(_fill, tensor, recorded.refs[name])
                )
        recorded.program.replay(seed, {storage: _all(each) for storage, each in fills.items()})


def _fill(tensor: torch.Tensor, ref: Ref, view: Callable[[Ref], torch.Tensor]) -> None:
    local_tensor(tensor).copy_(view(ref)[box_of(tensor)])


def _all(fills: Iterable[Deliver]) -> Deliver:
    def deliver(view: Callable[[Ref], torch.Tensor]) -> None:
        for fill in fills:
            fill(view)

    return deliver


def _allocated(part: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Replaces every tensor of `part` by one with memory; returns them by name, tied ones once."""
    fresh: dict[int, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}
    replaced = []  # kept, so that no other tensor gets the id of one of them
    for path, module in part.named_modules():
        for held in held_tensors(module):
            for name, tensor in list(held.items()):
                if tensor is None:
                    continue
                if id(tensor) not in fresh:
                    replaced.append(tensor)
                    fresh[id(tensor)] = _with_memory(tensor, device)
                    named[unwrapped_name(f"{path}.{name}" if path else name)] = fresh[id(tensor)]
                setattr(module, name, fresh[id(tensor)])
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # torch 2.13 does this in `FSDPModule._apply`, which would separate tied params
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for shard in group.fsdp_params:
                    shard.reset_sharded_param()  # type: ignore[no-untyped-call]
    return named


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor.to_local(), device=device)
        made: torch.Tensor = DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    else:
        made = torch.empty_like(tensor, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
