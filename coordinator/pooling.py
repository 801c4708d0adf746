"""Pooling: figures that devices report of rows of their own, added up so that no single device decides the result.

Nobody can check such a figure. So no device counts for more labels than the median one, and no label for more loss
than `MOST_LOSS`: of n devices, one that lies weighs 2/n at most, and no sum overflows.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low

MOST_LOSS = 20.0
"""Mean loss a label, in nats, that a device's figures count for at most: a probability of 2e-9 for what was right."""


def label_cap(labels: Iterable[int]) -> int:
    """The most labels that one of these devices counts for: those of the median one, of two the lower."""
    return median_low(labels)


def bounded_loss(loss_sum: float, labels: int) -> float:
    """The loss that counts, of a sum over so many labels."""
    return min(loss_sum, MOST_LOSS * labels)
