"""Params of a torch module as a plain `.safetensors` file: float32, sorted keys, nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from edge_client.files import make_durably
from models import tensor_file
from models.options import JobError
from models.pretrain.dtensor import full_tensor
from models.pretrain.world import World
from models.tensor_file import Entry
from models.zoo.spec import ModelSpec

Params = Mapping[str, npt.NDArray[Any]]
Shape = tuple[int, ...]


class Readable(Protocol):
    """Params in files."""

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> torch.Tensor:
        """A tensor, or a part of it, as float32; nothing else is read."""


@dataclass(frozen=True)
class FromParams:
    """Creates a module whose tensors `names` have the values in `source`, which are read one by one.

    Attributes:
        constructor: of the module with random values.
    """

    constructor: Callable[[], nn.Module]
    source: Readable
    names: frozenset[str]

    def __call__(self) -> nn.Module:
        module = self.constructor()
        with torch.no_grad():
            for name, tensor in float_tensors(module).items():
                if name in self.names and not tensor.is_meta:
                    tensor.copy_(self.source.read(name))
        return module


def params_of(module: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Parameters and float buffers, keys as in `state_dict` and sorted, float32, C order, copied."""
    return {
        name: np.array(tensor.detach().to("cpu", torch.float32).contiguous().numpy())
        for name, tensor in sorted(float_tensors(module).items())
    }


def save(module: nn.Module, path: Path) -> dict[str, Any]:
    """Writes the module's params to `path`; returns the file's `parameters`, `bytes` and `model_sha256`."""
    return write(path, module, (tensor for _, tensor in sorted(float_tensors(module).items())))


def save_parts(
    parts: Sequence[nn.Module], spec: ModelSpec, world: World, path: Path
) -> dict[str, Any] | None:
    """As `save`, of the whole model that processes hold parts of; None but on process 0. A collective.

    A process holds one whole tensor at a time. Buffers are those of process 0's coordinate on the data axis.
    """
    with torch.device("meta"):
        module = spec.module()
    tensors = gathered(parts, module, world)
    if world.rank == 0:
        return write(path, module, tensors)
    for _ in tensors:
        pass
    return None


def write(path: Path, module: nn.Module, tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """As `save`, with the values in `tensors`: those of `float_tensors(module)`, sorted by name. Holds one of them."""
    entries = {name: Entry(tuple(tensor.shape)) for name, tensor in float_tensors(module).items()}
    digest = hashlib.sha256()
    size = 0

    def content(temporary: Path) -> None:
        nonlocal size
        with temporary.open("wb") as file:

            def put(piece: bytes | memoryview) -> None:
                file.write(piece)
                digest.update(piece)

            size = tensor_file.write(entries, tensors, put)

    make_durably(path, content)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return {"parameters": parameters, "bytes": size, "model_sha256": digest.hexdigest()}


def gathered(parts: Sequence[nn.Module], whole: nn.Module, world: World) -> Iterator[torch.Tensor]:
    """The tensors of the model `whole` in turn, sorted by name, on every process. A collective."""
    mine = {
        unwrapped_name(name): tensor
        for part in parts
        for name, tensor in part.state_dict(keep_vars=True).items()
        if tensor.is_floating_point()
    }
    for name, like in sorted(float_tensors(whole).items()):
        own = mine.get(name)
        full = None if own is None else full_tensor(own.detach())
        if world.size("pp") > 1:
            full = _from_stage(full, tuple(like.shape), world)
        assert full is not None  # without stages, a process has a part of every tensor
        yield full


def _from_stage(mine: torch.Tensor | None, shape: Shape, world: World) -> torch.Tensor:
    """Broadcasts a float32 tensor that one stage has to all stages."""
    group = world.group("pp")
    owner = torch.tensor(world.coordinate("pp") if mine is not None else -1, device=world.device)
    dist.all_reduce(owner, dist.ReduceOp.MAX, group=group)
    full = torch.empty(shape, device=world.device) if mine is None else mine.contiguous()
    dist.broadcast(full, group=group, group_src=int(owner))
    return full


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


def mismatches(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
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


def shapes_of(module: nn.Module) -> dict[str, Shape]:
    """Shapes of `named_tensors`."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}


def float_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors a params file holds: parameters, tied ones under their first name, and persistent float buffers."""
    return {name: tensor for name, tensor in named_tensors(module).items() if tensor.is_floating_point()}
