"""A worker's part of a privacy audit.

    update      what a client sends after it has trained on given rows
    invert      what an attacker makes of an update, who knows the model and the task but no row
    losses      the loss of each of given rows

The attacker is a job of its own, so it has nothing of the client but the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.errors import UserError
from coordinator.workers.runtimes import Runtimes
from coordinator.workers.workspace_arrays import Workspace
from edge_client.data.examples import Examples
from edge_client.processes.channel import Frame
from edge_client.train.evaluation import EVALUATION_ROWS, score
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from strategies.params import Params, materialize, unflatten

Reply = tuple[dict[str, Any], list[bytes]]


def run(frame: Frame, params: Params, runtimes: Runtimes, data: Workspace) -> Reply:
    """Does the work that `frame` names, with the published `params`."""
    values = frame.values
    if values["work"] == "invert":
        return _invert(frame, params, runtimes)
    rows = np.array(values["rows"], np.int64)
    examples = Examples(data.x[rows], data.y[rows])
    if values["work"] == "losses":
        return {}, [arrays.encode({"losses": _losses(params, runtimes, examples)})]
    streams = unflatten(arrays.decode(frame.blobs[0]))
    task = TrainTask.of(TaskMessage.from_json(values["task"]), streams)
    update = Trainer(runtimes.get(values["runtime"])).train(params, task, examples).update
    return {"examples": update.num_examples}, [arrays.encode(materialize(update.delta))]


def _losses(params: Params, runtimes: Runtimes, examples: Examples) -> npt.NDArray[np.float32]:
    """The loss of each row, summed over its labels; float32 [N]."""
    runtime, losses = runtimes.get("evaluation"), []
    for at in range(0, len(examples), EVALUATION_ROWS):
        part = examples.rows(slice(at, at + EVALUATION_ROWS))
        logits = runtime.logits(params, part.x)
        losses += [score(logits[i : i + 1], part.y[i : i + 1]).loss_sum for i in range(len(part))]
    return np.array(losses, np.float32)


def _invert(frame: Frame, params: Params, runtimes: Runtimes) -> Reply:
    """The reconstructed rows, or for a model of tokens a score of each token; and the labels that the update reveals."""
    from coordinator.workers.audit import inversion
    from models.zoo import ModelSpec

    spec = runtimes.spec()
    if not isinstance(spec, ModelSpec):
        raise UserError("a Keras model cannot be attacked here: attacks differentiate twice, in PyTorch")
    low, high = (arrays.decode(frame.blobs[1])[name] for name in ("low", "high"))
    known = inversion.Known(
        params, low, high, **{name: frame.values[name] for name in ("rows", "iterations", "seed")}
    )
    found = inversion.invert(spec, known, arrays.decode(frame.blobs[0]))
    tensors: Mapping[str, npt.NDArray[Any]] = {
        name: value for name, value in (("rows", found.rows), ("tokens", found.tokens)) if value is not None
    }
    return {"method": found.method, "labels": found.labels}, [arrays.encode(dict(tensors))]
