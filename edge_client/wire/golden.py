"""Golden answers: a question that every runtime can pose to itself, and how answers are compared.

Old or broken runtimes may run a file without an error and compute something else (wrong kernels for some
operations, garbage from quantized ones). So a manifest holds PyTorch's answer to one fixed question, and
a device refuses a file whose answer differs on its own runtime. The question is megabytes of params, so
the manifest does not hold it; it follows from shapes by integer arithmetic that any language can repeat:

    mix(n):  n ^= n >> 16;  n *= 0x7feb352d;  n ^= n >> 15;  n *= 0x846ca68b;  n ^= n >> 16     (mod 2³²)
    word(stream, i) = mix(mix(stream + 1) + i)        i counts elements in C order
    float element   = offset + scale · (word / 2³¹ − 1), in float64, then rounded to float32
    id or label     = word mod (vocabulary or classes)

Streams: 0 is x, 1 is y, 2 and on are the tensors in the manifest's order. The labels of the last
`padded_rows` rows are then padding. (The mixer is Wellons' lowbias32.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.train.trainer import PADDING
from edge_client.wire.manifest import Fill, Glimpse, Manifest, Tolerance
from strategies.params import Params

FIRST = 8
"""Elements of an array that a glimpse holds."""


@dataclass(frozen=True)
class Question:
    """One batch and the params it is asked of; shaped as the manifest says."""

    params: Params
    x: npt.NDArray[Any]
    y: npt.NDArray[np.int32]


def question(manifest: Manifest) -> Question:
    """The question's arrays, from the shapes and fills in the manifest."""
    rows, golden = manifest.batch_size, manifest.golden
    x_shape, described = (rows, *manifest.input.shape), manifest.input
    y = _ids((rows, *manifest.label_shape), 1, manifest.classes)
    y[rows - golden.padded_rows :] = PADDING
    return Question(
        params={
            t.name: _floats(t.shape, 2 + k, golden.fills[t.name]) for k, t in enumerate(manifest.tensors)
        },
        x=_floats(x_shape, 0, golden.x)
        if described.dtype == "float32"
        else _ids(x_shape, 0, described.vocab or manifest.classes),
        y=y,
    )


def glimpse(array: npt.NDArray[Any]) -> Glimpse:
    """Norm in float64 and the first elements."""
    flat = np.asarray(array, np.float64).reshape(-1)
    return Glimpse(float(np.sqrt(np.sum(flat**2))), tuple(float(value) for value in flat[:FIRST]))


def disagreement(got: Glimpse, expected: Glimpse, tolerance: Tolerance) -> tuple[str, float, float] | None:
    """(what, got, expected) of the first number that is off, or None. A NaN is off."""
    pairs = [("norm", got.norm, expected.norm)]
    pairs += [(f"element {i}", a, b) for i, (a, b) in enumerate(zip(got.first, expected.first, strict=True))]
    for what, a, b in pairs:
        if not abs(a - b) <= tolerance.absolute + tolerance.relative * abs(b):
            return what, a, b
    return None


def _words(shape: tuple[int, ...], stream: int) -> npt.NDArray[np.uint32]:
    start = _mix(np.asarray([stream + 1], dtype=np.uint32))
    count: npt.NDArray[np.uint32] = np.arange(math.prod(shape), dtype=np.uint32)
    return _mix(start + count).reshape(shape)


def _mix(n: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    n = n ^ (n >> np.uint32(16))
    n = n * np.uint32(0x7FEB352D)
    n = n ^ (n >> np.uint32(15))
    n = n * np.uint32(0x846CA68B)
    return n ^ (n >> np.uint32(16))


def _floats(shape: tuple[int, ...], stream: int, fill: Fill) -> npt.NDArray[np.float32]:
    unit = _words(shape, stream).astype(np.float64) / 2**31 - 1
    return (fill.offset + fill.scale * unit).astype(np.float32)


def _ids(shape: tuple[int, ...], stream: int, count: int) -> npt.NDArray[np.int32]:
    return (_words(shape, stream) % np.uint32(count)).astype(np.int32)
