"""Params of a torch module as a plain `.safetensors` file: float32, sorted keys, nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
import torch.distributed as dist
from torch import nn

from edge_client.files import write_durably
from models.job import JobError
from models.pretrain.dtensor import full_tensor
from models.pretrain.world import World
from models.zoo.spec import ModelSpec

Params = Mapping[str, npt.NDArray[Any]]


def params_of(module: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Parameters and float buffers, keys as in `state_dict` and sorted, float32, C order, copied."""
    return {
        name: np.array(tensor.detach().to("cpu", torch.float32).contiguous().numpy())
        for name, tensor in sorted(float_tensors(module).items())
    }


def gather(parts: Sequence[nn.Module], spec: ModelSpec, world: World) -> nn.Module | None:
    """The whole model on process 0, None on the others. A collective.

    Process 0 holds the whole model in memory. Buffers are those of its coordinate on the data axis.
    """
    mine = {
        unwrapped_name(name): tensor
        for part in parts
        for name, tensor in part.state_dict(keep_vars=True).items()
        if tensor.is_floating_point()
    }
    module = spec.build(0)
    pipelined = world.size("pp") > 1
    for name, tensor in float_tensors(module).items():
        own = mine.get(name)
        full = None if own is None else full_tensor(own.detach())
        full = _from_stage(full, tensor, world) if pipelined else full
        if world.rank == 0 and full is not None:
            with torch.no_grad():
                tensor.copy_(full.cpu())
    return module if world.rank == 0 else None


def _from_stage(mine: torch.Tensor | None, like: torch.Tensor, world: World) -> torch.Tensor:
    """Broadcasts a tensor that one stage has to all stages."""
    group = world.group("pp")
    owner = torch.tensor(world.coordinate("pp") if mine is not None else -1, device=world.device)
    dist.all_reduce(owner, dist.ReduceOp.MAX, group=group)
    full = mine.contiguous() if mine is not None else torch.empty_like(like, device=world.device)
    dist.broadcast(full, group=group, group_src=int(owner))
    return full


def save(module: nn.Module, path: Path) -> dict[str, Any]:
    """Writes the module's params to `path`; returns the file's `parameters`, `bytes` and `model_sha256`."""
    content = safetensors.numpy.save(params_of(module))
    write_durably(path, content)
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "bytes": len(content),
        "model_sha256": hashlib.sha256(content).hexdigest(),
    }


def fill(module: nn.Module, params: Params, where: str) -> None:
    """Copies `params` into the module's parameters and float buffers.

    Raises:
        JobError: the tensors differ from the module's; the message starts with `where`.
    """
    found = {name: values.shape for name, values in params.items()}
    if problems := mismatches(found, {name: tuple(t.shape) for name, t in float_tensors(module).items()}):
        reason = "the params belong to another model or other options"
        raise JobError(f"{where}: tensor {problems[0]}; {reason}")
    copy_into(module, params)


def mismatches(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """One phrase for every tensor of either without a counterpart of the same shape in the other."""
    problems = []
    for name in sorted({*found, *expected}):
        if name not in found:
            problems.append(f"{name!r} is missing")
        elif name not in expected:
            problems.append(f"{name!r} is not one of the model's")
        elif found[name] != expected[name]:
            problems.append(f"{name!r} is {found[name]}, the model has {expected[name]}")
    return problems


def copy_into(module: nn.Module, params: Params) -> None:
    """Copies `params`, some of the module's parameters and float buffers or all, which must have their shapes."""
    tensors = float_tensors(module)
    with torch.no_grad():
        for name, values in params.items():
            tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)))


def unwrapped_name(name: str) -> str:
    """A parameter's name without the wrappers of DDP, recomputation and compilation."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers as in the state dict; a tied tensor once, under its first name, as clients have it."""
    tensors = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of `named_tensors`."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}


def float_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors a params file holds: parameters, tied ones under their first name, and persistent float buffers."""
    return {name: tensor for name, tensor in named_tensors(module).items() if tensor.is_floating_point()}
