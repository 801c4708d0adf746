"""Pooling: combines figures that devices report about their own rows, so that no single device decides the result.

Such figures cannot be verified. So no device counts for more labels than the median one, and no label for more loss than
`MAX_LOSS`: one dishonest device of n weighs at most 2/n, and no sum overflows.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low

MAX_LOSS = 20.0
"""Largest mean loss per label, in nats, that counts; it means a probability of 2e-9 for the right label."""


def label_cap(labels: Iterable[int]) -> int:
    """The most labels that one of these devices counts for: the (lower) median of their numbers."""
    return median_low(labels)


def bounded_loss(loss_sum: float, labels: int) -> float:
    """The loss sum over `labels` labels, capped."""
    return min(loss_sum, MAX_LOSS * labels)
