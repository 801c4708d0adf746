"""Params of a torch module as a plain `.safetensors` file: float32, keys sorted, nothing else in it."""

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
from safetensors import SafetensorError
from torch import nn

from edge_client.files import write_durably
from models.job import JobError
from models.pretrain.parallelize import whole_name
from models.pretrain.whole import whole as unsplit
from models.pretrain.world import World
from models.zoo import ModelSpec

Params = Mapping[str, npt.NDArray[Any]]


def params_of(module: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Parameters and float buffers, keys as in `state_dict` and sorted, float32, C order, copied."""
    return {
        name: np.array(tensor.detach().to("cpu", torch.float32).contiguous().numpy())
        for name, tensor in sorted(_float_tensors(module).items())
    }


def gather(parts: Sequence[nn.Module], spec: ModelSpec, world: World) -> nn.Module | None:
    """The whole model, in process 0; None in the others, which must call this too.

    Holds the whole model in memory there. Buffers are those of process 0's place in the data axis.
    """
    mine = {
        whole_name(name): tensor
        for part in parts
        for name, tensor in part.state_dict(keep_vars=True).items()
        if tensor.is_floating_point()
    }
    whole = spec.build(0) if world.rank == 0 else None
    staged = world.size("pp") > 1
    for name, tensor in _float_tensors(spec.build(0)).items():
        found = mine.get(name)
        full = None
        if found is not None:
            full = unsplit(found.detach())
        full = _from_stage(full, tensor, world) if staged else full
        if whole is not None and full is not None:
            with torch.no_grad():
                _float_tensors(whole)[name].copy_(full.cpu())
    return whole


def _from_stage(mine: torch.Tensor | None, like: torch.Tensor, world: World) -> torch.Tensor:
    """A tensor that one stage has, on all stages."""
    group = world.group("pp")
    owner = torch.tensor(world.place("pp") if mine is not None else -1, device=world.device)
    dist.all_reduce(owner, dist.ReduceOp.MAX, group=group)
    full = mine.contiguous() if mine is not None else torch.empty_like(like, device=world.device)
    dist.broadcast(full, group=group, group_src=int(owner))
    return full


def save(module: nn.Module, path: Path) -> dict[str, Any]:
    """Writes the module's params to `path`, and tells what the file is: `parameters`, `bytes`, `model_sha256`."""
    content = safetensors.numpy.save(params_of(module))
    write_durably(path, content)
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "bytes": len(content),
        "model_sha256": hashlib.sha256(content).hexdigest(),
    }


def load(module: nn.Module, path: Path) -> None:
    """Fills the module's parameters and float buffers from `path`.

    Raises:
        JobError: not a readable file, or it holds other tensors than the module has.
    """
    try:
        params = safetensors.numpy.load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise JobError(f"{path} is not a readable .safetensors file: {error}") from error
    fill(module, params, str(path))


def fill(module: nn.Module, params: Params, where: str) -> None:
    """Copies `params` into the module's parameters and float buffers.

    Raises:
        JobError: they are other tensors than the module has; `where` begins its message.
    """
    expected = _float_tensors(module)
    for name in sorted(set(params) | set(expected)):
        if name not in params or name not in expected:
            fault = "missing" if name not in params else "not one of the model's"
            raise JobError(
                f"{where}: tensor {name!r} is {fault}; the params belong to another model or other options"
            )
        if params[name].shape != tuple(expected[name].shape):
            raise JobError(
                f"{where}: tensor {name!r} is {params[name].shape}, the model has {tuple(expected[name].shape)}; "
                "the params belong to another model or other options"
            )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(params[name], dtype=np.float32)))


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers as in the state dict; a tied tensor once, under its first name, as clients have it."""
    tensors = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of `named_tensors`."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}


def _float_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in named_tensors(module).items() if tensor.is_floating_point()}
