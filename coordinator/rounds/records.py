"""Records of a run: scores, one line per round for the report, and the state after a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.json_values import finite
from strategies.params import Tensors
from strategies.state import State


@dataclass(frozen=True)
class Score:
    """The global model on held-out rows, None if there are none. `clients`: accuracy per client with such rows."""

    loss: float | None
    accuracy: float | None
    clients: Mapping[str, float]


@dataclass(frozen=True)
class RoundRecord:
    """One line of the report. What was not tested is None.

    Attributes:
        accepted: updates that entered the aggregate.
        silent: clients that did not answer, or answered after the round was over.
        client_accuracy_min, client_accuracy_median, client_accuracy_max: over single clients.
        seconds: of the whole round, evaluation and commit included.
        rejections: results by reason, `aggregation.OUTLIER` and `engine.MODEL_NOT_FINITE` among them.
    """

    round: int
    selected: int
    accepted: int
    rejected: int
    silent: int
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    client_accuracy_min: float | None
    client_accuracy_median: float | None
    client_accuracy_max: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    rejections: Mapping[str, int]


@dataclass(frozen=True)
class RunState:
    """Params and strategy state after `round`."""

    round: int
    params: Tensors
    strategy: State


def as_row(record: RoundRecord) -> dict[str, Any]:
    """The record as JSON values; a non-finite number, such as the loss of a diverged model, becomes None."""
    return {name: finite(value) for name, value in vars(record).items()}


def totals(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rejections by reason and bytes, over all rounds."""
    rejections: Counter[str] = Counter()
    for row in rounds:
        rejections.update(row["rejections"])
    return {
        "rejections": dict(sorted(rejections.items())),
        "bytes_up": sum(row["bytes_up"] for row in rounds),
        "bytes_down": sum(row["bytes_down"] for row in rounds),
    }
