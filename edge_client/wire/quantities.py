"""What a device reports of a model that predicts a quantity, such as a price: sums over its held-out rows.

With the number of rows and the sum of squared errors they give MAE, RMSE and R2 of any set of rows together. The labels of a
few rows follow from their sums, so a device reports none of fewer rows than its `statistics.minimum_count`.
"""

from __future__ import annotations

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
