"""What the kinds of task mean: the loss that a model is trained with, and the figure that models are compared by.

Of every figure more is better, and 1 is perfect. Labels of `regression` are quantities, float32; all others are classes, int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

TaskKind = Literal["classification", "next_token", "regression"]

MODEL_KEYS = ("input_shape", "classes", "input_dtype", "task")
"""Properties of the data that a model depends on."""


@dataclass(frozen=True)
class Task:
    """Attributes:
    loss: what it is, for people.
    figure: its key in reports and records.
    title: of the figure, for people.
    """

    loss: str
    figure: Literal["accuracy", "r2"]
    title: str


_OF_CLASSES = Task("cross-entropy", "accuracy", "accuracy")
OF_QUANTITIES = Task("squared error", "r2", "R2")

TASKS: Mapping[TaskKind, Task] = {
    "classification": _OF_CLASSES,
    "next_token": _OF_CLASSES,
    "regression": OF_QUANTITIES,
}


def of_figures(row: Mapping[str, Any]) -> Task:
    """The kind of task whose models have these figures."""
    return OF_QUANTITIES if OF_QUANTITIES.figure in row else _OF_CLASSES
