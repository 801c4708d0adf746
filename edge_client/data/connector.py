"""The interface of connectors: local data for a trainer, described by the device's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    # The daemon reads configurations but never data, and stays small without numpy.
    from edge_client.data.examples import Examples


class DataProblem(ValueError):
    """The data or its description is wrong; the message names file, place and value, and says what to do."""


@dataclass(frozen=True)
class DataConfig:
    """One data set in the device's configuration. `options`: the further keys of its kind."""

    kind: str
    path: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preview:
    """A summary of a data set for the person who wrote the configuration; JSON types only, no value of any row.

    Attributes:
        schema: (name, kind) of every column or array, and the label's class names where configured.
        rows: for training. held_out: for evaluation.
        input_shape: of one example. label_shape: of its label; empty: one class.
        labels: class name or index -> rows of it (labels, for sequences), training and held out together.
    """

    schema: tuple[tuple[str, str], ...]
    rows: int
    held_out: int
    input_shape: tuple[int, ...]
    input_dtype: str
    label_shape: tuple[int, ...]
    labels: Mapping[str, int]


class Connector(Protocol):
    """Local data, only ever read. Each method raises DataProblem where the data is not as described."""

    def train(self) -> Examples:
        """Rows to train on; `x` float32 or int32, `y` int32 class indices, C order."""

    def held_out(self) -> Examples:
        """Rows that are never trained on; may be none."""

    def preview(self) -> Preview: ...
