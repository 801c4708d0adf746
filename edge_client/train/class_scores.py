"""Counts by class and by predicted probability, from logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.examples import PADDING
from edge_client.train.evaluation import softmax
from edge_client.wire.scores import (
    CALIBRATION_BINS,
    MAX_CLASSES,
    SCORE_BINS,
    ClassScores,
    Counts,
    scored_classes,
)


def class_scores(logits: npt.NDArray[np.float32], y: npt.NDArray[Any]) -> ClassScores | None:
    """The counts of `logits` [N, classes] against the labels `y` [N], without `PADDING`.

    None where nothing of the kind is reported: for more than `MAX_CLASSES` classes, sequences and logits that are not finite.
    """
    if logits.ndim != 2 or not 2 <= logits.shape[1] <= MAX_CLASSES:
        return None
    logits, y = logits[y != PADDING], y[y != PADDING]
    probabilities = softmax(logits)
    if not np.isfinite(probabilities).all():
        return None
    classes, predicted = logits.shape[1], logits.argmax(axis=1)
    confusion = np.bincount(y * classes + predicted, minlength=classes * classes)
    bins = np.minimum((probabilities * SCORE_BINS).astype(np.int64), SCORE_BINS - 1)
    scored = scored_classes(classes)
    if classes == 2:
        stated, came_true = probabilities[:, 1], y == 1
    else:
        stated, came_true = probabilities.max(axis=1), predicted == y
    steps = calibration_bins(stated)
    sums = np.bincount(steps, weights=stated, minlength=CALIBRATION_BINS)
    return ClassScores(
        confusion=tuple(_counts(row) for row in confusion.reshape(classes, classes)),
        positives=tuple(_histogram(bins[y == index, index]) for index in scored),
        negatives=tuple(_histogram(bins[y != index, index]) for index in scored),
        calibration_rows=_counts(np.bincount(steps, minlength=CALIBRATION_BINS)),
        calibration_correct=_counts(np.bincount(steps[came_true], minlength=CALIBRATION_BINS)),
        calibration_sums=tuple(float(total) for total in sums),
        squared_sum=float(np.square(probabilities - np.eye(classes)[y]).sum()),
    )


def calibration_bins(stated: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The calibration bin of each probability; a bin holds its upper edge."""
    edges = np.arange(1, CALIBRATION_BINS) / CALIBRATION_BINS
    return np.asarray(np.searchsorted(edges, stated), np.int64)


def _histogram(bins: npt.NDArray[np.int64]) -> Counts:
    return _counts(np.bincount(bins, minlength=SCORE_BINS))


def _counts(values: npt.NDArray[np.int64]) -> Counts:
    return tuple(int(value) for value in values)
