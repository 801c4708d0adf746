"""Pools the counts that devices report of a classifier, by class and by predicted probability.

As in `rounds.pooling`, no device counts for more labels than the cap: the counts of a larger one are scaled down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_client.wire.device import EvaluationResult
from edge_client.wire.scores import ClassScores

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PooledScores:
    """Counts over the rows of several devices, scaled down where a device has more labels than the cap.

    Attributes:
        confusion: [classes, classes], a row per true class.
        positives, negatives: [scored classes, bins], as in `wire.scores.ClassScores`.
        calibration: [3, bins]: rows, correct ones, and sums of probabilities.
        squared_sum: squared errors of the probabilities.
        counted: the confusion as the devices report it, without a cap.
        devices: how many report counts.
    """

    confusion: Floats
    positives: Floats
    negatives: Floats
    calibration: Floats
    squared_sum: float
    counted: Sequence[Sequence[int]]
    devices: int


def pool_scores(results: Iterable[EvaluationResult], cap: int) -> PooledScores | None:
    """The pooled counts of the devices that report any; None if no device does. All are of one model."""
    reported = [
        (min(1.0, cap / result.labels), result.scores) for result in results if result.scores is not None
    ]
    if not reported:
        return None
    return PooledScores(
        confusion=_sum((share, scores.confusion) for share, scores in reported),
        positives=_sum((share, scores.positives) for share, scores in reported),
        negatives=_sum((share, scores.negatives) for share, scores in reported),
        calibration=_sum((share, _calibration(scores)) for share, scores in reported),
        squared_sum=sum(share * scores.squared_sum for share, scores in reported),
        counted=_counted([scores for _, scores in reported]),
        devices=len(reported),
    )


def _calibration(scores: ClassScores) -> Sequence[Sequence[float]]:
    return scores.calibration_rows, scores.calibration_correct, scores.calibration_sums


def _sum(parts: Iterable[tuple[float, Sequence[Sequence[float]]]]) -> Floats:
    return np.sum([share * np.asarray(counts, np.float64) for share, counts in parts], axis=0)  # type: ignore[no-any-return]


def _counted(listed: Sequence[ClassScores]) -> list[list[int]]:
    """Sums of Python integers, which do not overflow."""
    classes = range(len(listed[0].confusion))
    return [
        [sum(scores.confusion[true][predicted] for scores in listed) for predicted in classes]
        for true in classes
    ]
