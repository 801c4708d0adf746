"""Cross-entropy and accuracy of logits, or squared error of quantities, summed the same way in every runtime."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edge_client.data.examples import PADDING
from edge_client.wire.quantities import QuantitySums, figures

EVALUATION_ROWS = 256
"""Rows evaluated at a time. Fixed, so that sums are the same on every device."""


@dataclass(frozen=True)
class Evaluation:
    """Cross-entropy and accuracy of one set of params.

    Attributes:
        loss_sum: summed over all labels; of quantities the squared errors.
        correct: correct labels per row, int64 [N].
        labels: counted labels per row, int64 [N]; 1 for classification, T for sequences.
        logits: of each row, float32 [N, (T,) classes], where they were asked for.
        quantities: sums over labels that are quantities.
    """

    loss_sum: float
    correct: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32] | None = None
    quantities: QuantitySums | None = None

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, int(self.labels.sum()))

    @property
    def quality(self) -> float:
        """Larger is better, 1 is perfect: the accuracy; of quantities R2, 0 where all labels are equal."""
        return self.accuracy if self.quantities is None else figures_of(self)["r2"] or 0.0

    @property
    def quality_name(self) -> Literal["accuracy", "r2"]:
        return "accuracy" if self.quantities is None else "r2"

    @property
    def accuracy(self) -> float:
        return int(self.correct.sum()) / max(1, int(self.labels.sum()))


def score(logits: npt.NDArray[Any], y: npt.NDArray[Any]) -> Evaluation:
    """Evaluation of logits [n, (T,) classes] against labels [n, (T)]; `PADDING` labels do not count.

    Where `y` holds floats, they are quantities, and `logits` [n, 1] predicts them: no label is correct.
    """
    wide = logits.astype(np.float64)
    if y.dtype.kind == "f":
        errors, labels = wide[:, 0] - y, y.astype(np.float64)
        return Evaluation(
            loss_sum=float(np.square(errors).sum()),
            correct=np.zeros(len(y), np.int64),
            labels=np.ones(len(y), np.int64),
            quantities=QuantitySums(
                float(np.abs(errors).sum()), float(labels.sum()), float(np.square(labels).sum())
            ),
        )
    shifted = wide - wide.max(axis=-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    counted = y != PADDING
    chosen = np.take_along_axis(log_probabilities, np.where(counted, y, 0)[..., None], axis=-1)[..., 0]
    correct = (wide.argmax(axis=-1) == y) & counted
    per_row = (len(y), -1)
    return Evaluation(
        loss_sum=float(-(chosen * counted).sum()),
        correct=correct.reshape(per_row).sum(axis=1, dtype=np.int64),
        labels=counted.reshape(per_row).sum(axis=1, dtype=np.int64),
    )


def figures_of(scored: Evaluation, deviation: float = 1.0) -> dict[str, float | None]:
    """R2, MAE and RMSE of rows whose labels are quantities; at least one row. `deviation`: by which labels were divided."""
    assert scored.quantities is not None, "labels are quantities"
    return figures(len(scored.labels), scored.loss_sum, scored.quantities, deviation)


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Probabilities [N, (T,) classes] in float64; not finite where the logits are not."""
    with np.errstate(all="ignore"):
        wide = logits.astype(np.float64)
        powers = np.exp(wide - wide.max(axis=-1, keepdims=True, initial=-np.inf))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float64)


def merge(parts: Iterable[Evaluation]) -> Evaluation:
    """Merges evaluations of consecutive rows."""
    listed = list(parts)
    none = np.zeros(0, np.int64)
    logits = [part.logits for part in listed if part.logits is not None]
    quantities = [part.quantities for part in listed if part.quantities is not None]
    return Evaluation(
        loss_sum=float(sum(part.loss_sum for part in listed)),
        correct=np.concatenate([none, *(part.correct for part in listed)]),
        labels=np.concatenate([none, *(part.labels for part in listed)]),
        logits=np.concatenate(logits) if logits else None,
        quantities=_sum(quantities),
    )


def _sum(parts: list[QuantitySums]) -> QuantitySums | None:
    if not parts:
        return None
    return QuantitySums(
        sum(part.absolute_sum for part in parts),
        sum(part.label_sum for part in parts),
        sum(part.label_square_sum for part in parts),
    )
