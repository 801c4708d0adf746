"""What a worker does with the rows of the server's own, in the round that is open.

    train       an update of these rows, as a client would send it
    answer      the logits of a client's model on them
    distil      a model that has learnt the mean of such logits

Models come and go as deltas to what the round began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.errors import UserError
from coordinator.rounds.plan import generator
from coordinator.workers.block import RoundStart
from coordinator.workers.runtimes import Runtimes
from coordinator.workers.server_rows import open_rows
from edge_client.data.examples import Examples
from edge_client.processes.channel import Frame
from edge_client.train.evaluation import EVALUATION_ROWS
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from strategies.params import Params, materialize

Reply = tuple[dict[str, Any], list[bytes]]


def run(frame: Frame, start: RoundStart, runtimes: Runtimes, folder: Path) -> Reply:
    """Does the work that `frame` names. `folder`: the workspace."""
    values, rows = frame.values, open_rows(folder)
    if values["work"] == "train":
        return {}, [arrays.encode(_train(start, values, runtimes, rows))]
    name = values["class"] or None
    before = start.params_of(name)
    own = runtimes.narrower(name, before)[0]
    model = _moved(before, arrays.decode(frame.blobs[0]))
    if values["work"] == "answer":
        return {}, [arrays.encode({"logits": _answer(model, own, rows.x)})]
    logits = arrays.decode(frame.blobs[1])["logits"]
    trained = _distil(model, start, values, own, rows.x, logits)
    delta = {key: trained[key].astype(np.float64) - before[key] for key in own.get("evaluation").trainable}
    return {}, [arrays.encode(delta)]


def _train(start: RoundStart, values: Mapping[str, Any], runtimes: Runtimes, rows: Examples) -> Params:
    """The delta of the server's rows."""
    work = start.terms.work
    seed = int(generator(values["seed"], "server", work.round).integers(2**63))
    task = TrainTask.of(replace(work, client="server", seed=seed, code=None), start.streams)
    data = Examples(np.array(rows.x), np.array(rows.y))
    trained = Trainer(runtimes.get("evaluation")).train(start.params, task, data)
    return materialize(trained.update.delta)


def _answer(params: Params, runtimes: Runtimes, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The model's logits for all rows."""
    runtime = runtimes.get("evaluation")
    starts = range(0, len(x), EVALUATION_ROWS)
    return np.concatenate([runtime.logits(params, x[at : at + EVALUATION_ROWS]) for at in starts])


def _distil(
    params: Params,
    start: RoundStart,
    values: Mapping[str, Any],
    runtimes: Runtimes,
    x: npt.NDArray[Any],
    logits: npt.NDArray[np.float32],
) -> Params:
    """The model after it has learnt to answer `logits`: KL(teacher ‖ student), with Adam. Lin 2020, equation 1 and section 4.1."""
    import torch

    from edge_client.train import torch_trainer
    from models.compress.distil import distillation_loss
    from models.compress.step import StepRefused
    from models.compress.tuning import Tuning, tune
    from models.labels import PADDING
    from models.pretrain.data.batches import Arrays

    how = values["how"]
    module = runtimes.spec().build(0)
    torch_trainer.load(module, params)

    def objective(module: torch.nn.Module, x: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        torch_trainer.train_mode(module)
        unlabelled = torch.full((len(x),), PADDING)
        return distillation_loss(module(x), teacher, unlabelled, how["temperature"], 1.0)

    options = Tuning(how["epochs"], how["batch_size"], how["lr"], weight_decay=0.0)
    rng = generator(values["seed"], f"distillation {values['class']}", start.terms.work.round)
    try:
        tune(module, Arrays(np.array(x), logits), options, rng, objective)
    except StepRefused as error:
        raise UserError(f"the distillation of FedDF failed: {error}; lower strategy.distil_lr") from None
    return torch_trainer.read(module)


def _moved(params: Params, delta: Params) -> Params:
    """The params after `delta`, as a server's optimizer with rate 1 moves them."""
    moved = {key: (params[key].astype(np.float64) + value).astype(np.float32) for key, value in delta.items()}
    return {**params, **moved}
