"""Pooling: combines figures that devices report about their own rows, so that no single device decides the result.

Such figures cannot be verified. So no device counts for more labels than the median one, and no label for more loss than
`MAX_LOSS`: one dishonest device of n weighs at most 2/n, and no sum overflows. The same bound holds for the squared error,
and for the square, of a label that is a quantity, in units of the training labels' deviation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median_low

from edge_client.wire.device import EvaluationResult
from edge_client.wire.quantities import QuantitySums, figures

MAX_LOSS = 20.0
"""Largest mean loss per label, in nats, that counts; it means a probability of 2e-9 for the right label."""


def label_cap(labels: Iterable[int]) -> int:
    """The most labels that one of these devices counts for: the (lower) median of their numbers."""
    return median_low(labels)


def bounded_loss(loss_sum: float, labels: int) -> float:
    """The loss sum over `labels` labels, capped."""
    return min(loss_sum, MAX_LOSS * labels)


def pool_quantities(
    results: Iterable[EvaluationResult], cap: int, deviation: float
) -> dict[str, float | None] | None:
    """R2, MAE and RMSE over the rows of the devices that report the sums; None if no device does.

    `cap`: labels that one device counts for. `deviation`: of the training labels; MAE and RMSE are in the labels' own unit.
    R2 is None where all labels are equal.
    """
    labels = squared = absolute = total = squares = 0.0
    for result in results:
        sums = result.quantity
        if sums is None:
            continue
        share, limit = min(1.0, cap / result.labels), MAX_LOSS * result.labels
        loss, square = min(result.loss_sum, limit), min(sums.label_square_sum, limit)
        most = math.sqrt(result.labels * square)
        labels += share * result.labels
        squared += share * loss
        absolute += share * min(sums.absolute_sum, math.sqrt(result.labels * loss))
        total += share * max(-most, min(most, sums.label_sum))
        squares += share * square
    return figures(labels, squared, QuantitySums(absolute, total, squares), deviation) if labels else None
