"""Numeric columns filled and scaled, with what the training rows of each site can know and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

NEAR = 0.05
"""How far a mean may be from 0, and a standard deviation from 1, in a column that is called standardised."""


@dataclass(frozen=True)
class Standardised:
    """`values` [N, F] without a gap; `before` [F] is True for columns that were standardised before."""

    values: Values
    before: Flags


def standardised(values: Values, training: Flags, site: npt.NDArray[np.int32] | None) -> Standardised:
    """Each column with mean 0 and standard deviation 1 over the training rows of each site.

    Gaps (NaN) become the mean of the site's training rows, and what is constant there becomes 0. Where a site's
    training rows have no value in a column, it borrows the whole table's mean and deviation. A column that
    arrives standardised, per site or over the whole table, is only filled.

    Args:
        values: [N, F], NaN where a value is missing.
        training: [N], rows that statistics may be taken from.
        site: [N] site of each row, or None for one table.
    """
    groups = _rows_by_site(site) if site is not None else [np.arange(len(values))]
    everyone = _moments(values[training])
    means, deviations = np.empty_like(values), np.empty_like(values)
    for rows in groups:
        own = _moments(values[rows[training[rows]]])
        known = ~np.isnan(own[0])
        means[rows] = np.where(known, own[0], np.nan_to_num(everyone[0]))
        deviations[rows] = np.where(known, own[1], everyone[1])
    filled = np.where(np.isnan(values), means, values)
    before = _standard(values, training, [np.arange(len(values))]) | _standard(values, training, groups)
    # A constant's computed deviation is rounding error, not 0.
    constant = deviations <= 1e-12 * np.abs(means)
    scaled = np.where(constant, 0.0, (filled - means) / np.where(constant, 1.0, deviations))
    return Standardised(np.where(before, filled, scaled), before)


def _rows_by_site(site: npt.NDArray[np.int32]) -> list[Rows]:
    order = np.argsort(site, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(site[order])) + 1)


def _moments(values: Values) -> tuple[Values, Values]:
    """Mean and standard deviation [F] of each column without its gaps; NaN and 0 for a column without values."""
    present = ~np.isnan(values)
    count = present.sum(axis=0)
    mean = np.where(present, values, 0.0).sum(axis=0) / np.maximum(count, 1)
    spread = (np.where(present, values - mean, 0.0) ** 2).sum(axis=0) / np.maximum(count, 1)
    return np.where(count, mean, np.nan), np.sqrt(spread)


def _standard(values: Values, training: Flags, groups: Sequence[Rows]) -> Flags:
    """[F]: columns that vary, and have mean 0 and deviation 1 wherever they vary, in every group.

    Whoever standardised the table may have counted its test rows in or not; either will do.
    """
    result = np.zeros(values.shape[1], np.bool_)
    for chosen in (training, np.ones_like(training)):
        parts = [_near(values[rows[chosen[rows]]]) for rows in groups]
        varies, near = np.array([part[0] for part in parts]), np.array([part[1] for part in parts])
        result |= (near | ~varies).all(axis=0) & varies.any(axis=0)
    return result


def _near(values: Values) -> tuple[Flags, Flags]:
    """[F]: whether a column varies, and whether its mean and deviation (over n or n − 1) are near 0 and 1."""
    mean, deviation = _moments(values)
    count = (~np.isnan(values)).sum(axis=0)
    unbiased = deviation * np.sqrt(count / np.maximum(count - 1, 1))
    one = (np.abs(deviation - 1) <= NEAR) | (np.abs(unbiased - 1) <= NEAR)
    return deviation > 0, one & (np.abs(mean) <= NEAR)
