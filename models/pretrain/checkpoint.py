"""Params of a torch module as a plain `.safetensors` file: float32, keys sorted, nothing else in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import nn

from edge_client.files import write_durably
from models.job import JobError

Params = Mapping[str, npt.NDArray[Any]]


def params_of(module: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Parameters and float buffers, keys as in `state_dict` and sorted, float32, C order, copied."""
    return {
        name: np.array(tensor.detach().to("cpu", torch.float32).contiguous().numpy())
        for name, tensor in sorted(_float_tensors(module).items())
    }


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
    expected = _float_tensors(module)
    for name in sorted(set(params) | set(expected)):
        if name not in params or name not in expected:
            where = "missing" if name not in params else "not one of the model's"
            raise JobError(
                f"{path}: tensor {name!r} is {where}; the params belong to another model or other options"
            )
        if params[name].shape != tuple(expected[name].shape):
            raise JobError(
                f"{path}: tensor {name!r} is {params[name].shape}, the model has {tuple(expected[name].shape)}; "
                "the params belong to another model or other options"
            )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(params[name], dtype=np.float32)))


def _float_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """As in the state dict; a tied tensor once, under its first name, as the clients' trainers have it."""
    tensors = {n: t for n, t in module.state_dict(keep_vars=True).items() if t.is_floating_point()}
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}
