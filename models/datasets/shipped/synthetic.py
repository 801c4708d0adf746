"""Synthetic data of any shape, for trials and benchmarks: one prototype per class, plus noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import stream
from models.datasets.large_arrays import new_array, pieces
from models.datasets.notation import Call
from strategies.suggestions import suggest

CLIENTS = 20

NOISE = 0.35
"""Standard deviation of a value around its prototype: 784 of them have the length of an MNIST image."""

SEPARATION = 8.0
"""Mean distance between two prototypes, in standard deviations of the noise, whatever the shape.

At 8 the two nearest of a few dozen classes hardly overlap: a linear model can learn them nearly perfectly, and
must see examples to do so.
"""

DRAWN = "drawn.npy"
"""The file of inputs that are too large for memory."""

LARGEST = 2**31
"""Most values in all rows together: 8 GiB."""


@dataclass(frozen=True)
class SyntheticOptions:
    """`samples` training rows a client, of `shape` and over `classes`."""

    shape: tuple[int, ...] = (784,)
    classes: int = 62
    samples: int = 60


def options(call: Call) -> SyntheticOptions:
    """The options of `synthetic(shape=[…], classes=…, samples=…)`.

    Raises:
        DataError: an unknown option, or a value out of its range.
    """
    named: Mapping[str, Any] = call.named
    known = list(SyntheticOptions.__dataclass_fields__)
    for name in named:
        if name not in known:
            raise DataError(
                f"synthetic has no option {name!r}{suggest(name, known)}; its options: {', '.join(known)}"
            )
    shape = named.get("shape", list(SyntheticOptions.shape))
    if not isinstance(shape, list | tuple) or not shape or not all(_counts(extent, 1) for extent in shape):
        raise DataError(
            f"synthetic: shape = {shape!r}, expected a list of whole numbers from 1, such as [28, 28]"
        )
    for name, least in (("classes", 2), ("samples", 1)):
        if name in named and not _counts(named[name], least):
            raise DataError(f"synthetic: {name} = {named[name]!r}, expected a whole number from {least}")
    return SyntheticOptions(**{**named, "shape": tuple(shape)})


def load(call: Call, clients: int | None, seed: int, folder: Path | None = None) -> Dataset:
    """x float32 [N, *shape]: `samples` training rows for each of `clients`, and a quarter as many for testing.

    `folder`: gets x as a file if it is large.

    Raises:
        DataError: options out of range, or more than fits in memory.
    """
    chosen, clients = options(call), clients or CLIENTS
    training = clients * chosen.samples
    rows = training + max(1, training // 4)
    size = math.prod(chosen.shape)
    if rows * size > LARGEST:
        raise DataError(
            f"synthetic: {rows:,} rows of {size:,} values are {rows * size * 4 / 2**30:,.0f} GiB, at most "
            f"{LARGEST * 4 / 2**30:.0f} are made; lower shape, samples or clients"
        )
    rng = stream(seed, "synthetic")
    y = rng.permutation(np.arange(rows, dtype=np.int32) % chosen.classes)
    spread = NOISE * SEPARATION / math.sqrt(2 * size)
    prototypes = rng.standard_normal((chosen.classes, size), np.float32) * np.float32(spread)
    x = new_array((rows, *chosen.shape), np.float32, None if folder is None else folder / DRAWN)
    flat = x.reshape(rows, size)
    for piece in pieces(flat):
        drawn = rng.standard_normal(flat[piece].shape, np.float32)
        drawn *= np.float32(NOISE)
        drawn += prototypes[y[piece]]
        flat[piece] = drawn
    return Dataset(
        name="synthetic",
        x=x,
        y=y,
        test=np.arange(rows) >= training,
        classes=chosen.classes,
        notes=(f"Made-up data: {chosen.samples} training rows for each of {clients} clients.",),
    )


def _counts(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
