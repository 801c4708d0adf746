"""An update as one vector: the values of its tensors one after the other, in the order in which they are given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Shapes = Mapping[str, tuple[int, ...]]
Vector = npt.NDArray[np.float32]


def count(shapes: Shapes) -> int:
    """Number of values in all tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


def join(tensors: Mapping[str, npt.NDArray[Any]]) -> Vector:
    """All values as one vector, tensor by tensor in the given order."""
    flat = [np.asarray(tensors[name], np.float32).reshape(-1) for name in tensors]
    return np.concatenate(flat) if flat else np.zeros(0, np.float32)


def split(values: Vector, shapes: Shapes) -> dict[str, Vector]:
    """The inverse of `join`."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(values, ends[:-1]) if len(shapes) else []
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def largest(values: Vector, chosen: int) -> npt.NDArray[np.int64]:
    """The positions of the `chosen` largest magnitudes, increasing; of equal ones the first."""
    magnitudes = np.abs(values)
    least = np.partition(magnitudes, len(values) - chosen)[len(values) - chosen]
    above = np.flatnonzero(magnitudes > least)
    equal = np.flatnonzero(magnitudes == least)[: chosen - len(above)]
    return np.sort(np.concatenate([above, equal]))
