"""Figures of a classifier on the rows of devices, from the counts that they report.

Sensitivity, specificity, precision, F1, balanced accuracy, Brier score and calibration are those of the rows themselves. The AUC
is computed from histograms: two rows in one bin count as a tie, so it differs from that of the rows by at most `auc_error`,
half the share of pairs of a positive and a negative row that share a bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.reports import metrics
from coordinator.reports.metrics import Calibration
from coordinator.rounds.scores import Floats, PooledScores


def pooled_classification(
    pooled: PooledScores, names: Sequence[str], positive: int, *, detailed: bool
) -> dict[str, Any]:
    """The figures of `metrics.classification` over all rows that devices report, and `auc_error`, `rows` and `devices`.

    `confusion` counts rows as the devices report them; in all other figures a device counts for at most the cap.
    `detailed`: with the figures of each class, the confusion and the bins of the calibration.
    """
    classes, binary = len(pooled.confusion), len(pooled.confusion) == 2
    aucs, errors = zip(*map(_auc, pooled.positives, pooled.negatives), strict=True)
    calibration = Calibration(*pooled.calibration)
    if binary:
        aucs, errors = aucs * 2, errors * 2  # the probability of the first class is 1 less the second's
        calibration = calibration if positive == 1 else _mirrored(calibration)
    rows = float(pooled.confusion.sum())
    brier = pooled.squared_sum / rows / (2 if binary else 1)
    figures = metrics.summarize(pooled.confusion, aucs, calibration, brier, names, positive)
    figures["confusion"] = pooled.counted
    for index, each in enumerate(figures["classes"]):
        each["rows"] = sum(pooled.counted[index])
    assert len(aucs) == classes
    return {
        "devices": pooled.devices,
        "rows": sum(map(sum, pooled.counted)),
        "auc_error": metrics.mean_of(errors),
        **{key: value for key, value in figures.items() if detailed or key not in metrics.DETAILS},
    }


def _auc(positives: Floats, negatives: Floats) -> tuple[float | None, float | None]:
    """Area under the ROC curve of two histograms, ties at half, and by how much it may be off; None without pairs.

    Mann and Whitney 1947.
    """
    pairs = float(positives.sum() * negatives.sum())
    if not pairs:
        return None, None
    tied = float((positives * negatives).sum()) / 2
    below = np.cumsum(negatives) - negatives
    return (float((positives * below).sum()) + tied) / pairs, tied / pairs


def _mirrored(calibration: Calibration) -> Calibration:
    """The bins of the probability of the other class of two."""
    rows = calibration.rows[::-1]
    return Calibration(rows, rows - calibration.correct[::-1], rows - calibration.sums[::-1])
