"""Tensors that may be split over processes, told apart without what splits them.

`torch.distributed.tensor` takes half as long to import as torch itself, and who trains alone never needs it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_split(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether this process has a part of `tensor` only. Nothing is split before somebody has imported what splits."""
    splitting = sys.modules.get("torch.distributed.tensor")
    return splitting is not None and isinstance(tensor, splitting.DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` unsplit; a collective where it is split, which all its processes must call."""
    return tensor.full_tensor() if is_split(tensor) else tensor
