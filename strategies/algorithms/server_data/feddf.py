"""FedDF: clients may train models of different architectures; each is averaged within its class, then learns from the ensemble of all client models on rows of the server. Lin 2020, Algorithm 3.

The teacher is the mean of the logits of all models that the round's clients have sent. With one architecture this is the
paper's Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from strategies import options
from strategies.algorithms.server_data.server import RUN_MODEL, Answers, Distillation, NeedsServer, Server
from strategies.client_rules import PlainSGD
from strategies.cohort_fold import NeedsEachUpdate, SingleUpdates
from strategies.params import Tensors
from strategies.slices import Shapes, shapes_of
from strategies.strategy import SGD, MeanFold, Strategy, Weighting, clipping
from strategies.update import Aggregate, Update


@dataclass(frozen=True)
class EnsembleDistillation(NeedsEachUpdate, NeedsServer):
    """Averages within each class, then distils.

    Attributes:
        shapes: of the trained tensors of each class, by which an update shows its class; empty: all are of the run's model.
    """

    uses_labels: ClassVar[bool] = False

    weighting: Weighting
    distillation: Distillation
    server: Server | None = None
    shapes: Mapping[str, Shapes] = field(default_factory=dict, hash=False)

    def start(self, cohort_size: int) -> EnsembleFold:
        return EnsembleFold(self, cohort_size)

    def class_of(self, update: Update) -> str:
        """The device class of an update, which passed the intake."""
        if not self.shapes:
            return RUN_MODEL
        own = shapes_of(update.delta)
        return next(name for name, shapes in self.shapes.items() if own == dict(shapes))


class EnsembleFold(SingleUpdates):
    """Keeps every update of the cohort. The extra streams of its aggregate are the deltas of other classes' models."""

    def __init__(self, aggregator: EnsembleDistillation, cohort_size: int) -> None:
        self._aggregator = aggregator
        self._size = cohort_size
        self._rest = MeanFold(aggregator.weighting, cohort_size)
        self._updates: dict[int, Update] = {}

    def add(self, position: int, update: Update) -> None:
        self._rest.add(position, replace(update, delta={}, extras={}))
        self._updates[position] = update

    def finish(self) -> Aggregate:
        aggregator, server = self._aggregator, self._aggregator.server
        assert server is not None  # `with_server`
        rest = self._rest.finish()
        updates = sorted(self._updates.items())
        answers = mean_answers(
            server.answer([(aggregator.class_of(update), update.delta) for _, update in updates])
        )
        moved = self._means()
        if answers is not None:
            moved = dict(server.distil(moved, answers, aggregator.distillation))
        return replace(rest, delta=moved.pop(RUN_MODEL), extras=moved)

    def _means(self) -> dict[str, Tensors]:
        """The mean delta of each class; no tensors where no client of it answered."""
        folds: dict[str, MeanFold] = {}
        for position, update in self._updates.items():
            fold = folds.setdefault(
                self._aggregator.class_of(update), MeanFold(self._aggregator.weighting, self._size)
            )
            fold.add(position, replace(update, extras={}))
        names = (RUN_MODEL, *self._aggregator.shapes)
        return {name: folds[name].finish().delta if name in folds else {} for name in dict.fromkeys(names)}


def mean_answers(answers: Sequence[Answers]) -> Answers | None:
    """The mean of what the models answer, without those whose logits are not all finite; None if there are none."""
    finite = [each for each in answers if np.isfinite(each).all()]
    if not finite:
        return None
    total = np.zeros(finite[0].shape)
    for each in finite:
        total += each
    return np.asarray(total / len(finite), np.float32)


@dataclass(frozen=True)
class FedDF:
    """Which clients have which class, and what goes with them, `coordinator.experiments` says."""

    limits: ClassVar[str] = "simulations"

    classes: Mapping[str, Any] = options.models(
        "model of each device class, one of them that of the run; default: all clients have it"
    )
    shares: Mapping[str, float] = options.table(
        {},
        "shares of the classes among the clients; default: equal",
        low=0.0,
        low_open=True,
    )
    memory_mib: Mapping[str, float] = options.table(
        {},
        "memory from which a client has a class, instead of shares; the most demanding class counts",
        low=0.0,
    )
    distil_epochs: int = options.field(20, "passes over the server's rows in each round", low=0)
    distil_batch_size: int = options.field(32, "rows of the server in a step", low=1)
    distil_lr: float = options.field(1e-3, "learning rate of Adam on the server", low=0.0, low_open=True)
    temperature: float = options.field(1.0, "of both softmaxes", low=0.01, high=1e3)
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        how = Distillation(self.distil_epochs, self.distil_batch_size, self.distil_lr, self.temperature)
        ensemble = EnsembleDistillation(self.weighting, how)
        return Strategy("feddf", PlainSGD(), clipping(self.clip_norm), ensemble, SGD(), modes=("sync",))
