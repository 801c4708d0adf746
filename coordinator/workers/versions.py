"""Training from several versions of the model: what a worker of an asynchronous simulation holds, and the job it does.

The coordinator sends each version once and says which ones it still needs, so a worker holds as many as have clients at work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coordinator.workers import faults
from coordinator.workers.workspace_arrays import Workspace
from edge_client.data.examples import Examples
from edge_client.processes.channel import Frame
from edge_client.train.trainer import Runtime, Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from strategies.params import Params


class Versions:
    """The params of a worker by the round that began with them."""

    def __init__(self) -> None:
        self._params: dict[int, Params] = {}

    def add(self, frame: Frame) -> tuple[dict[str, Any], list[bytes]]:
        """Adds a version; drops those that the message does not name."""
        kept = set(frame.values["needed"])
        self._params = {number: params for number, params in self._params.items() if number in kept}
        self._params[frame.values["round"]] = arrays.decode(frame.blobs[0])
        return {}, []

    def train(
        self, frame: Frame, run: Workspace, runtime: Callable[[str], Runtime]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The uploads of a client; its task says which version it starts from."""
        values = frame.values
        task = TaskMessage.from_json(values["task"])
        rows = run.part(values["part"])
        trainer = Trainer(runtime(values["runtime"]))
        local = trainer.train(
            self._params[task.round], TrainTask.of(task, {}), Examples(run.x[rows], run.y[rows])
        )
        if values["fault"] is None:
            return {}, [arrays.encode_result(task, local.update)]
        return {}, list(faults.encode_uploads(values["fault"], task, local.update))
