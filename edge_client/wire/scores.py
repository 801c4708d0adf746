"""What a device reports of a classifier: counts over its held-out rows, by class and by predicted probability.

A confusion matrix gives sensitivity, specificity, precision and F1 of any set of rows together. Histograms of the probability
of a class, of its rows and of all others, give the AUC but for pairs that share a bin; `reports.pooled_metrics` states that
error. A device reports nothing here if a class has held-out rows, but fewer than its `statistics.minimum_count`. A single
cell or bin may hold a single row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_CLASSES = 20
"""Most classes of which a device reports counts; those of more would be longer than most updates."""
SCORE_BINS = 200
"""Bins of a predicted probability, of equal width."""
CALIBRATION_BINS = 10
"""Bins of the calibration, of equal width; a bin holds its upper edge."""
_ROUNDING = 1e-6

Counts = tuple[int, ...]


@dataclass(frozen=True)
class ClassScores:
    """Counts over held-out rows with a label.

    Attributes:
        confusion: a row per true class, a column per predicted one.
        positives, negatives: rows of the class, and all others, by the predicted probability of the class: `SCORE_BINS`
            counts for each class; of two classes for the second alone.
        calibration_rows: rows by the probability of the predicted class, or of the second class if there are two.
        calibration_correct: how many of them are of that class.
        calibration_sums: sum of that probability.
        squared_sum: squared errors of the probabilities, summed over rows and classes.
    """

    confusion: tuple[Counts, ...]
    positives: tuple[Counts, ...]
    negatives: tuple[Counts, ...]
    calibration_rows: Counts
    calibration_correct: Counts
    calibration_sums: tuple[float, ...]
    squared_sum: float


def scored_classes(classes: int) -> range:
    """The classes that have histograms."""
    return range(1, 2) if classes == 2 else range(classes)


def has_small_class(scores: ClassScores, minimum_count: int) -> bool:
    """Whether a class has rows, but fewer than `minimum_count`."""
    return any(0 < sum(row) < minimum_count for row in scores.confusion)


def checks(scores: ClassScores, labels: int, correct: int, classes: int) -> Iterator[tuple[bool, str]]:
    """What the types do not express: a condition, and what is wrong if it is false. Stop at the first that fails.

    `labels`, `correct`: of the same message. `classes`: of the model.
    """
    confusion, histograms = scores.confusion, len(scored_classes(classes))
    yield 2 <= classes <= MAX_CLASSES, f"is given for {classes} classes, expected 2 to {MAX_CLASSES}"
    yield (
        len(confusion) == classes and all(len(row) == classes for row in confusion),
        f"confusion is not {classes} x {classes}",
    )
    for name, counts in (("positives", scores.positives), ("negatives", scores.negatives)):
        yield (
            len(counts) == histograms and all(len(row) == SCORE_BINS for row in counts),
            f"{name} is not {histograms} x {SCORE_BINS}",
        )
    calibration = (scores.calibration_rows, scores.calibration_correct, scores.calibration_sums)
    yield (
        all(len(each) == CALIBRATION_BINS for each in calibration),
        f"calibration has not {CALIBRATION_BINS} bins",
    )
    counted = (*confusion, *scores.positives, *scores.negatives, *calibration[:2])
    yield all(count >= 0 for row in counted for count in row), "a count is below 0"
    yield from _sum_checks(scores, labels, correct)


def _sum_checks(scores: ClassScores, labels: int, correct: int) -> Iterator[tuple[bool, str]]:
    of_class = [sum(row) for row in scores.confusion]
    hits = sum(row[index] for index, row in enumerate(scores.confusion))
    yield sum(of_class) == labels, f"confusion counts {sum(of_class)} rows of {labels}"
    yield hits == correct, f"confusion counts {hits} correct rows, the message {correct}"
    for index, positives, negatives in zip(
        scored_classes(len(of_class)), scores.positives, scores.negatives, strict=True
    ):
        got, expected = (sum(positives), sum(negatives)), (of_class[index], labels - of_class[index])
        yield got == expected, f"histograms of class {index} count {got} rows, confusion {expected}"
    came_true = of_class[1] if len(of_class) == 2 else correct
    yield sum(scores.calibration_rows) == labels, "calibration_rows do not add up to the labels"
    yield sum(scores.calibration_correct) == came_true, f"calibration_correct do not add up to {came_true}"
    bins = zip(scores.calibration_rows, scores.calibration_correct, scores.calibration_sums, strict=True)
    for index, (rows, right, total) in enumerate(bins):
        low, high = rows * index / CALIBRATION_BINS, rows * (index + 1) / CALIBRATION_BINS
        slack = _ROUNDING * rows
        yield right <= rows, f"calibration bin {index} has {right} of {rows} rows"
        yield (
            low - slack <= total <= high + slack,
            f"calibration_sums of bin {index} is {total}, expected {low:g} to {high:g}",
        )
    yield (
        0 <= scores.squared_sum <= (2 + _ROUNDING) * labels,
        f"squared_sum is {scores.squared_sum}, expected 0 to {2 * labels}",
    )
