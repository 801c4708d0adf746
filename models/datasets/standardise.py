"""Numeric columns filled and scaled by the training rows of each site, and quantities to predict by those of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edge_client.data import labels
from edge_client.data.standardise import Flags, Values, moments, scaled
from models.datasets.dataset import DataError

Rows = npt.NDArray[np.int64]

NEAR = 0.05
"""How far a mean may be from 0, and a standard deviation from 1, in a column that is called standardised."""


def standardised(values: Values, training: Flags, site: npt.NDArray[np.int32] | None) -> tuple[Values, Flags]:
    """Each column with mean 0 and standard deviation 1 over the training rows of each site.

    Gaps (NaN) become the mean of the site's training rows, and what is constant there becomes 0. Where a site's
    training rows have no value in a column, it uses the mean and deviation of the whole table. A column that
    arrives standardised, per site or over the whole table, is only filled.

    Args:
        values: [N, F], NaN where a value is missing.
        training: [N], rows that statistics may be taken from.
        site: [N] site of each row, or None for one table.

    Returns:
        [N, F] without a gap, and [F]: True for columns that arrive standardised.
    """
    groups = _rows_by_site(site) if site is not None else [np.arange(len(values))]
    everyone = moments(values[training])
    means, deviations = np.empty_like(values), np.empty_like(values)
    for rows in groups:
        own = moments(values[rows[training[rows]]])
        known = ~np.isnan(own[0])
        means[rows] = np.where(known, own[0], np.nan_to_num(everyone[0]))
        deviations[rows] = np.where(known, own[1], everyone[1])
    before = _standard(values, training, [np.arange(len(values))]) | _standard(values, training, groups)
    return scaled(values, means, deviations, before), before


def _rows_by_site(site: npt.NDArray[np.int32]) -> list[Rows]:
    order = np.argsort(site, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(site[order])) + 1)


def _standard(values: Values, training: Flags, groups: Sequence[Rows]) -> Flags:
    """[F]: columns that vary, and have mean 0 and deviation 1 wherever they vary, in every group.

    The table may have been standardised with or without its test rows.
    """
    result = np.zeros(values.shape[1], np.bool_)
    for chosen in (training, np.ones_like(training)):
        parts = [_near(values[rows[chosen[rows]]]) for rows in groups]
        varies, near = np.array([part[0] for part in parts]), np.array([part[1] for part in parts])
        result |= (near | ~varies).all(axis=0) & varies.any(axis=0)
    return result


def _near(values: Values) -> tuple[Flags, Flags]:
    """[F]: whether a column varies, and whether its mean and deviation (over n or n − 1) are near 0 and 1."""
    mean, deviation = moments(values)
    count = (~np.isnan(values)).sum(axis=0)
    unbiased = deviation * np.sqrt(count / np.maximum(count - 1, 1))
    one = (np.abs(deviation - 1) <= NEAR) | (np.abs(unbiased - 1) <= NEAR)
    return deviation > 0, one & (np.abs(mean) <= NEAR)


def standardised_labels(
    y: npt.NDArray[np.float64], test: Flags
) -> tuple[npt.NDArray[np.float32], tuple[float, float]]:
    """Quantities [N] with mean 0 and deviation 1 over the training rows, and their mean and deviation before.

    Raises:
        DataError: the training labels are all equal.
    """
    mean, deviation = float(y[~test].mean()), float(y[~test].std())
    if not deviation > 0:
        raise DataError(f"every training label is {mean:g}; there is nothing to predict")
    scale = mean, deviation
    return labels.standardised(y, scale), scale
