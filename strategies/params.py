"""Params: named float32 tensors, the only form of a model outside a framework.

Keys are PyTorch `state_dict` keys, the layout is PyTorch's, dtype float32, C order. Every runtime converts
to and from this form at its own boundary; aggregation, the wire and the disk use nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
Params = dict[str, FloatArray]
Tensors = Mapping[str, FloatArray]
"""Read-only params; they may be on disk and loaded one tensor at a time."""


class ShapeMismatch(ValueError):
    """Two sets of named tensors differ in names or shapes; the message names the first difference."""


def require_same_shapes(actual: Mapping[str, FloatArray], expected: Mapping[str, FloatArray]) -> None:
    """Checks that both hold the same names with the same shapes.

    Raises:
        ShapeMismatch: naming the first tensor, in sorted order, that is missing, extra or of another shape.
    """
    for name in sorted(set(actual) | set(expected)):
        if name not in actual:
            raise ShapeMismatch(f"tensor {name!r} is missing, expected shape {expected[name].shape}")
        if name not in expected:
            raise ShapeMismatch(f"tensor {name!r} is not one of {sorted(expected)}")
        if actual[name].shape != expected[name].shape:
            raise ShapeMismatch(f"tensor {name!r} is {actual[name].shape}, expected {expected[name].shape}")


def zeros_like(params: Mapping[str, FloatArray]) -> Params:
    """Float32 zeros with the names and shapes of `params`."""
    return {name: np.zeros(value.shape, np.float32) for name, value in params.items()}


def difference(trained: Mapping[str, FloatArray], base: Mapping[str, FloatArray]) -> Params:
    """`trained - base`, float32, over the names of `trained`."""
    # `asarray`, because numpy's arithmetic on zero-dimensional arrays returns scalars.
    return {name: np.asarray(value - base[name], np.float32) for name, value in trained.items()}
