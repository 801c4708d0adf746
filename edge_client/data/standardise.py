"""Columns of numbers filled and scaled by the mean and deviation of training rows.

A simulation does so for each site of a table, a device for its own rows; both by the arithmetic here, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def moments(values: Values) -> tuple[Values, Values]:
    """Mean and standard deviation [F] of each column of [N, F] without its gaps; NaN and 0 for a column without values."""
    present = ~np.isnan(values)
    count = present.sum(axis=0)
    mean = np.where(present, values, 0.0).sum(axis=0) / np.maximum(count, 1)
    spread = (np.where(present, values - mean, 0.0) ** 2).sum(axis=0) / np.maximum(count, 1)
    return np.where(count, mean, np.nan), np.sqrt(spread)


def scaled(values: Values, means: Values, deviations: Values, only_filled: Flags) -> Values:
    """`values` [N, F] with mean 0 and deviation 1, gaps (NaN) at the mean, and 0 in a column that is constant.

    Args:
        values: what is scaled.
        means, deviations: of the training rows, [F] or [N, F]; a mean is never NaN.
        only_filled: [F], columns whose gaps are filled and whose values stay as they are.
    """
    filled = np.where(np.isnan(values), means, values)
    # A constant's computed deviation is rounding error, not 0.
    constant = deviations <= 1e-12 * np.abs(means)
    result = np.where(constant, 0.0, (filled - means) / np.where(constant, 1.0, deviations))
    return np.where(only_filled, filled, result)


@dataclass(frozen=True)
class Moments:
    """What the values of an example are scaled by.

    Attributes:
        means, deviations: float64 [F]; NaN for a value that stays as it is, such as those of categories.
        only_filled: [F], values whose gaps are filled with the mean and that else stay as they are.
    """

    means: Values
    deviations: Values
    only_filled: Flags

    def apply(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """`x` [N, …] filled and scaled."""
        flat = x.reshape(len(x), math.prod(x.shape[1:]))
        result = np.empty(flat.shape, np.float32)
        kept = np.isnan(self.means)
        result[:, kept] = flat[:, kept]
        for places in _in_pairs(np.flatnonzero(~kept)):
            values = flat.take(places, axis=1).astype(np.float64)
            result[:, places] = scaled(
                values, self.means[places], self.deviations[places], self.only_filled[places]
            )
        return result.reshape(x.shape)


def local_moments(
    x: npt.NDArray[Any], training: Flags, categories: Collection[int] = (), before: Collection[int] = ()
) -> Moments:
    """The moments of one device's training rows.

    Args:
        x: [N, …], NaN where a value is missing.
        training: [N], rows that statistics may be taken from.
        categories: places of values in an example that are left as they are.
        before: places of values that arrive standardised and are only filled.
    """
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    means, deviations = np.full((2, flat.shape[1]), np.nan)
    for places in _in_pairs(np.setdiff1d(np.arange(flat.shape[1]), sorted(categories))):
        values = np.ascontiguousarray(flat.take(places, axis=1), np.float64)
        mean, deviations[places] = moments(values[training])
        means[places] = np.nan_to_num(mean)
    return Moments(means, deviations, np.isin(np.arange(flat.shape[1]), list(before)))


def _in_pairs(places: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    """Two or three columns at a time, which bounds the memory.

    Never one by itself, unless it is the only one: numpy adds a single column in another order than several, and the last
    bit would depend on it.
    """
    return [part for part in np.array_split(places, max(1, len(places) // 2)) if len(part)]
