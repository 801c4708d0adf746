"""How a worker trains the simulated clients of one job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coordinator.workers.workspace_arrays import Workspace
from edge_client.data.examples import Examples
from edge_client.train.trainer import LocalResult, Runtime, Trainer, TrainTask
from strategies.params import Params


@dataclass(frozen=True)
class ClientTask:
    """One client of a job. `rows`: its rows of the workspace; `state`: what it kept, empty the first time."""

    client: str
    task: TrainTask
    rows: npt.NDArray[np.int64]
    state: Mapping[str, Params]


@dataclass(frozen=True)
class Stack:
    """What several clients learnt, in their order.

    Attributes:
        deltas: trained minus base by tensor name, float32 [clients, …]; the next call may overwrite them.
        steps: steps that each client took.
        losses: each client's mean training loss per example.
    """

    deltas: Params
    steps: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float64]


class ClientTrainer(Protocol):
    def train(
        self, params: Params, clients: Sequence[ClientTask], data: Workspace
    ) -> Iterable[LocalResult] | Stack:
        """What each client learnt, starting from `params`."""


@dataclass(frozen=True)
class OneByOne:
    """Trains one client after the other in a runtime."""

    runtime: Runtime

    def train(self, params: Params, clients: Sequence[ClientTask], data: Workspace) -> Iterator[LocalResult]:
        trainer = Trainer(self.runtime)
        for each in clients:
            examples = Examples(data.x[each.rows], data.y[each.rows])
            yield trainer.train(params, each.task, examples, each.state)
