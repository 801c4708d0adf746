"""Figures of a classifier on labelled rows (sensitivity, specificity, precision, F1, AUC, calibration, confusion) and of a regression.

The definitions are scikit-learn's, computed with NumPy, because importing scikit-learn would take longer than the figures. A
figure that the rows do not define, such as the AUC of rows of one class, is None and never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.examples import PADDING
from edge_client.train.evaluation import figures_of, score, softmax

Floats = npt.NDArray[np.float64]

MAX_CLASSES = 100
"""Most classes for which these figures are computed."""
BINS = 10
"""Bins of the calibration, of equal width."""
HEADLINE = ("balanced_accuracy", "sensitivity", "specificity", "precision", "f1", "auc", "brier", "ece")
REGRESSION = ("r2", "mae", "rmse")
_OF_CLASS = ("sensitivity", "specificity", "precision", "f1", "auc")


def classification(
    logits: npt.NDArray[np.float32], y: npt.NDArray[np.int32], names: Sequence[str]
) -> dict[str, Any]:
    """All figures of `logits` [N, classes] against the labels `y` [N]. `names`: of the classes, empty if they have none.

    Of two classes the second is the positive one: the figures are its own. Of more classes they are the means over the
    classes that define them. `brier` is the squared error of the positive class' probability, or summed over the classes.
    The bins of `calibration` are of the positive class' probability, or of the predicted class' (Guo 2017,
    arXiv:1706.04599); `ece` is the expected calibration error over them. `confusion`: a row per true class, a column per
    predicted one.
    """
    logits, y = logits[y != PADDING], y[y != PADDING]
    classes = logits.shape[1]
    named = [str(name) for name in names] or [str(index) for index in range(classes)]
    confusion = np.bincount(y * classes + logits.argmax(axis=1), minlength=classes * classes)
    confusion = confusion.reshape(classes, classes)
    probabilities = softmax(logits)
    usable = bool(np.isfinite(probabilities).all())
    per_class = [
        {"class": named[index], **_of_class(confusion, index, probabilities if usable else None, y)}
        for index in range(classes)
    ]
    binary = classes == 2
    chosen = per_class[1:] if binary else per_class
    calibration = _calibration(probabilities, y, binary) if usable and len(y) else None
    return {
        "positive": named[1] if binary else None,
        "balanced_accuracy": _mean(each["sensitivity"] for each in per_class),
        **{key: _mean(each[key] for each in chosen) for key in _OF_CLASS},
        "brier": _brier(probabilities, y, binary) if usable and len(y) else None,
        "ece": calibration["ece"] if calibration else None,
        "classes": per_class,
        "confusion": confusion.tolist(),
        "calibration": calibration["bins"] if calibration else [],
    }


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


def _of_class(
    confusion: npt.NDArray[np.int64], index: int, probabilities: Floats | None, y: npt.NDArray[np.int32]
) -> dict[str, Any]:
    """Figures of one class against all others."""
    hits, rows = int(confusion[index, index]), int(confusion[index].sum())
    predicted, total = int(confusion[:, index].sum()), int(confusion.sum())
    return {
        "rows": rows,
        "sensitivity": _ratio(hits, rows),
        "specificity": _ratio(total - rows - predicted + hits, total - rows),
        "precision": _ratio(hits, predicted),
        "f1": _ratio(2 * hits, rows + predicted),
        "auc": None if probabilities is None else _auc(probabilities[:, index], y == index),
    }


def _auc(scores: Floats, positive: npt.NDArray[np.bool_]) -> float | None:
    """Area under the ROC curve by ranks, ties at their mean (Mann and Whitney 1947); None for rows of one kind."""
    count = int(positive.sum())
    pairs = count * (len(positive) - count)
    if not pairs:
        return None
    _, inverse, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[inverse]
    return float((ranks[positive].sum() - count * (count + 1) / 2) / pairs)


def _brier(probabilities: Floats, y: npt.NDArray[np.int32], binary: bool) -> float:
    errors = np.square(probabilities - np.eye(probabilities.shape[1])[y]).sum(axis=1)
    return float(errors.mean() / (2 if binary else 1))


def _calibration(probabilities: Floats, y: npt.NDArray[np.int32], binary: bool) -> dict[str, Any]:
    stated = probabilities[:, 1] if binary else probabilities.max(axis=1)
    came_true = (y == 1) if binary else probabilities.argmax(axis=1) == y
    bins = np.searchsorted(np.arange(1, BINS) / BINS, stated)  # a bin holds its upper edge
    lines = []
    for index in np.unique(bins):
        inside = bins == index
        lines.append(
            {
                "from": index / BINS,
                "to": (index + 1) / BINS,
                "rows": int(inside.sum()),
                "predicted": float(stated[inside].mean()),
                "observed": float(came_true[inside].mean()),
            }
        )
    gaps = sum(line["rows"] * abs(line["observed"] - line["predicted"]) for line in lines)
    return {"ece": float(gaps / len(y)), "bins": lines}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None
