"""Figures of a classifier on labelled rows (sensitivity, specificity, precision, F1, AUC, calibration, confusion) and of a regression.

The definitions are scikit-learn's, computed with NumPy, because importing scikit-learn would take longer than the figures. A
figure that the rows do not define, such as the AUC of rows of one class, is None and never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.examples import PADDING
from edge_client.train.class_scores import calibration_bins
from edge_client.train.evaluation import figures_of, score, softmax
from edge_client.wire.scores import CALIBRATION_BINS

Floats = npt.NDArray[np.float64]

MAX_CLASSES = 100
"""Most classes for which these figures are computed."""
HEADLINE = ("balanced_accuracy", "sensitivity", "specificity", "precision", "f1", "auc", "brier", "ece")
REGRESSION = ("r2", "mae", "rmse")
DETAILS = ("classes", "confusion", "calibration")
"""The figures that are not single numbers."""
_PIECE_ROWS = 65_536
_OF_CLASS = ("sensitivity", "specificity", "precision", "f1", "auc")


def classification(
    logits: npt.NDArray[np.float32], y: npt.NDArray[np.int32], names: Sequence[str], positive: int = 1
) -> dict[str, Any]:
    """All figures of `logits` [N, classes] against the labels `y` [N]. `names`: of the classes, empty if they have none.

    Of two classes the figures are those of the one with the index `positive`. Of more classes they are the means over the
    classes that define them. `brier` is the squared error of the positive class' probability, or summed over the classes.
    The bins of `calibration` are of the positive class' probability, or of the predicted class' (Guo 2017,
    arXiv:1706.04599); `ece` is the expected calibration error over them. `confusion`: a row per true class, a column per
    predicted one.
    """
    if not (counted := y != PADDING).all():
        logits, y = logits[counted], y[counted]
    classes = logits.shape[1]
    confusion = np.bincount(y * classes + logits.argmax(axis=1), minlength=classes * classes)
    confusion = confusion.reshape(classes, classes)
    stated = _Probabilities.of(logits)
    aucs: list[float | None] = [None] * classes
    calibration = brier = None
    if stated.are_finite:
        aucs = [auc(stated.column(index), y == index) for index in range(classes)]
    if stated.are_finite and len(y):
        calibration, brier = _calibration(stated, y, positive), _brier(stated, y)
    return summarize(confusion, aucs, calibration, brier, names, positive)


@dataclass(frozen=True)
class _Probabilities:
    """The softmax of logits [N, classes], of which only some are in memory at a time.

    Attributes:
        tops, totals: largest logit of each row, and the sum of the powers, float64 [N].
    """

    logits: npt.NDArray[np.float32]
    tops: Floats
    totals: Floats
    are_finite: bool

    @staticmethod
    def of(logits: npt.NDArray[np.float32]) -> _Probabilities:
        tops, totals = np.empty(len(logits)), np.empty(len(logits))
        are_finite = True
        with np.errstate(all="ignore"):
            for piece in _pieces(len(logits)):
                wide = logits[piece].astype(np.float64)
                tops[piece] = wide.max(axis=-1, initial=-np.inf)
                powers = np.exp(wide - tops[piece, None])
                totals[piece] = powers.sum(axis=-1)
                are_finite &= bool(np.isfinite(powers / totals[piece, None]).all())
        return _Probabilities(logits, tops, totals, are_finite)

    def column(self, index: int) -> Floats:
        """The probabilities of one class."""
        powers: Floats = np.exp(self.logits[:, index].astype(np.float64) - self.tops)
        return powers / self.totals

    def pieces(self) -> Iterator[tuple[slice, Floats]]:
        """The probabilities of consecutive rows."""
        for piece in _pieces(len(self.logits)):
            yield piece, softmax(self.logits[piece])


def _pieces(rows: int) -> Iterator[slice]:
    return (slice(start, start + _PIECE_ROWS) for start in range(0, rows, _PIECE_ROWS))


@dataclass(frozen=True)
class Calibration:
    """Bins of a stated probability, each [`CALIBRATION_BINS`]: rows, those of the class it is of, and its sum."""

    rows: Floats
    correct: Floats
    sums: Floats


def summarize(
    confusion: npt.NDArray[Any],
    aucs: Sequence[float | None],
    calibration: Calibration | None,
    brier: float | None,
    names: Sequence[str],
    positive: int,
) -> dict[str, Any]:
    """The figures of `classification`. `confusion`: [classes, classes], numbers of rows. `aucs`: of each class."""
    classes = len(confusion)
    named = class_names(names, classes)
    per_class = [
        {"class": named[index], **_of_class(confusion, index), "auc": auc} for index, auc in enumerate(aucs)
    ]
    binary = classes == 2
    chosen = [per_class[positive]] if binary else per_class
    return {
        "positive": named[positive] if binary else None,
        "balanced_accuracy": mean_of(each["sensitivity"] for each in per_class),
        **{key: mean_of(each[key] for each in chosen) for key in _OF_CLASS},
        "brier": brier,
        "ece": _calibration_error(calibration) if calibration else None,
        "classes": per_class,
        "confusion": confusion.tolist(),
        "calibration": _calibration_lines(calibration) if calibration else [],
    }


def class_names(names: Sequence[str], classes: int) -> list[str]:
    """The names of the classes, or their indices if they have none."""
    return [str(name) for name in names] or [str(index) for index in range(classes)]


def headline(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `classification` that are single numbers."""
    return {key: figures[key] for key in HEADLINE}


def regression(
    outputs: npt.NDArray[np.float32], y: npt.NDArray[np.float32], deviation: float
) -> dict[str, Any]:
    """R2, and the mean absolute and the root mean squared error in the labels' own unit.

    `outputs`, `y`: [N], standardised. `deviation`: by which they were divided. R2 is None of rows with equal labels.
    """
    if not len(y) or not np.isfinite(outputs).all():
        return dict.fromkeys(REGRESSION)
    return figures_of(score(outputs[:, None], y), deviation)


def _of_class(confusion: npt.NDArray[Any], index: int) -> dict[str, Any]:
    """Figures of one class against all others."""
    hits, rows = confusion[index, index].item(), confusion[index].sum().item()
    predicted, total = confusion[:, index].sum().item(), confusion.sum().item()
    return {
        "rows": rows,
        "sensitivity": _ratio(hits, rows),
        "specificity": _ratio(total - rows - predicted + hits, total - rows),
        "precision": _ratio(hits, predicted),
        "f1": _ratio(2 * hits, rows + predicted),
    }


def auc(scores: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Area under the ROC curve by ranks, ties at their mean (Mann and Whitney 1947); None for rows of one kind."""
    count = int(positive.sum())
    pairs = count * (len(positive) - count)
    if not pairs:
        return None
    _, inverse, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[inverse]
    return float((ranks[positive].sum() - count * (count + 1) / 2) / pairs)


def _brier(stated: _Probabilities, y: npt.NDArray[np.int32]) -> float:
    classes = stated.logits.shape[1]
    errors = np.empty(len(y))
    for piece, probabilities in stated.pieces():
        errors[piece] = np.square(probabilities - np.eye(classes)[y[piece]]).sum(axis=1)
    return float(errors.mean() / (2 if classes == 2 else 1))


def _calibration(given: _Probabilities, y: npt.NDArray[np.int32], positive: int) -> Calibration:
    if given.logits.shape[1] == 2:
        stated, came_true = given.column(positive), y == positive
    else:
        stated, came_true = np.empty(len(y)), np.empty(len(y), np.bool_)
        for piece, probabilities in given.pieces():
            stated[piece] = probabilities.max(axis=1)
            came_true[piece] = probabilities.argmax(axis=1) == y[piece]
    bins = calibration_bins(stated)
    weighted = (None, came_true.astype(np.float64), stated)
    return Calibration(
        *(np.bincount(bins, weights=each, minlength=CALIBRATION_BINS).astype(np.float64) for each in weighted)
    )


def _calibration_lines(calibration: Calibration) -> list[dict[str, Any]]:
    """Of the bins that have rows."""
    return [
        {
            "from": index / CALIBRATION_BINS,
            "to": (index + 1) / CALIBRATION_BINS,
            "rows": int(rows) if float(rows).is_integer() else float(rows),
            "predicted": float(calibration.sums[index] / rows),
            "observed": float(calibration.correct[index] / rows),
        }
        for index, rows in enumerate(calibration.rows)
        if rows
    ]


def _calibration_error(calibration: Calibration) -> float | None:
    """The expected calibration error: the gaps of the bins, weighted by their rows."""
    return _ratio(float(np.abs(calibration.correct - calibration.sums).sum()), float(calibration.rows.sum()))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are defined, None if none is."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
