"""How a worker trains the clients of a job: one after the other, or all of them as one computation.

A `ClientTrainer` only trains. Whether a result counts, and what becomes of it, is decided in `coordinator.workers.block`.
"""

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
    """The work of one client of a job.

    Attributes:
        rows: its rows of the workspace.
        state: what it has kept since its last accepted update.
    """

    client: str
    task: TrainTask
    rows: npt.NDArray[np.int64]
    state: Mapping[str, Params]


class ClientTrainer(Protocol):
    """Trains several clients from the same params."""

    def train(self, params: Params, clients: Sequence[ClientTask], data: Workspace) -> Iterable[LocalResult]:
        """The result of each client, in order. A result may be overwritten once the next one is asked for.

        A result may depend, in its last bits, on the other clients of the call: who they are follows from the cohort alone.
        """


@dataclass(frozen=True)
class OneByOne:
    """Trains one client after the other in a runtime."""

    runtime: Runtime

    def train(self, params: Params, clients: Sequence[ClientTask], data: Workspace) -> Iterator[LocalResult]:
        trainer = Trainer(self.runtime)
        for each in clients:
            examples = Examples(data.x[each.rows], data.y[each.rows])
            yield trainer.train(params, each.task, examples, each.state)
