"""Tensors that may be sharded over processes, handled without importing `torch.distributed.tensor`.

That import takes half as long as torch itself, and a single process never needs it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is sharded. It cannot be before some code has imported `torch.distributed.tensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


Box = tuple[slice, ...]
"""A part of a tensor: a range of each of its dims."""


def box_of(tensor: torch.Tensor) -> Box:
    """The part of `tensor` that this process has."""
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of `tensor`; itself where it is not sharded."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` unsharded; a collective of its processes where it is sharded."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
