"""What a server with rows of its own does in a round, beside adding up updates.

Training needs a framework, which this package has not: an aggregator that needs such work gets a `Server`, and computes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from strategies.params import Tensors
from strategies.strategy import Strategy

RUN_MODEL = ""
"""Stands for the run's own model where models of device classes have names."""

Answers = npt.NDArray[np.float32]
"""Logits of a model for each row of the server, [rows, classes]."""


@dataclass(frozen=True)
class Distillation:
    """How a model learns the answers of others.

    Attributes:
        epochs: over the server's rows.
        lr: of Adam.
        temperature: T of both softmaxes.
    """

    epochs: int
    batch_size: int
    lr: float
    temperature: float


class Server(Protocol):
    """The server's rows at work in the open round. Models are given as deltas to what the round began with, by device class."""

    def train(self) -> Tensors:
        """The delta that the server's own rows give, trained as a client of the round trains."""

    def answer(self, models: Sequence[tuple[str, Tensors]]) -> Sequence[Answers]:
        """What each model answers. `models`: device class, or `RUN_MODEL`, and delta."""

    def distil(
        self, starts: Mapping[str, Tensors], answers: Answers, how: Distillation
    ) -> Mapping[str, Tensors]:
        """The delta of each model after it has learnt these answers. `starts`: by device class; without an entry for a tensor it
        starts as in the round before."""


class NeedsServer:
    """What aggregators have in common that need a `Server`; they are dataclasses with the field `server`.

    `uses_labels`: whether they need the labels of its rows.
    """

    server: Server | None
    uses_labels: ClassVar[bool] = True


def uses_labels(strategy: Strategy) -> bool:
    """Whether the strategy needs the labels of these rows."""
    return isinstance(strategy.aggregator, NeedsServer) and strategy.aggregator.uses_labels


def needs_server(strategy: Strategy) -> bool:
    """Whether the strategy works only where the server has rows of its own."""
    return isinstance(strategy.aggregator, NeedsServer)


def with_server(strategy: Strategy, server: Server, **more: Any) -> Strategy:
    """The strategy with the server that it needs. `more`: further fields of its aggregator."""
    aggregator: Any = strategy.aggregator
    return replace(strategy, aggregator=replace(aggregator, server=server, **more))
