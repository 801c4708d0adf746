"""What a device reports of a model that predicts a quantity, such as a price: sums over its held-out rows.

With the number of rows and the sum of squared errors they give MAE, RMSE and R2 of any set of rows together. The labels of a
few rows follow from their sums, so a device reports none of fewer rows than its `statistics.minimum_count`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class QuantitySums:
    """Sums over held-out labels that are quantities, less `label_scale`'s mean and divided by its deviation.

    Attributes:
        absolute_sum: of the absolute errors.
        label_sum, label_square_sum: of the labels and of their squares.
    """

    absolute_sum: float
    label_sum: float
    label_square_sum: float


MIN_SPREAD = 1e-12
"""Variance, as a share of the mean square, that rounding cannot explain."""


def figures(
    labels: float, squared_sum: float, sums: QuantitySums, deviation: float = 1.0
) -> dict[str, float | None]:
    """R2, MAE and RMSE of `labels` > 0 rows, the errors in units of 1 / `deviation`. R2 is None where all labels are equal."""
    spread = sums.label_square_sum - sums.label_sum * (sums.label_sum / labels)
    varies = spread > MIN_SPREAD * sums.label_square_sum
    return {
        "r2": 1 - squared_sum / spread if varies else None,
        "mae": sums.absolute_sum / labels * deviation,
        "rmse": math.sqrt(squared_sum / labels) * deviation,
    }
