"""DP-SGD of simulated clients (`edge_client.train.private_trainer`): rows and noise follow from the seeds of their tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coordinator.errors import UserError
from coordinator.workers.training import ClientTasks
from coordinator.workers.workspace_arrays import Workspace
from edge_client.data.examples import Examples
from edge_client.train import schedule
from edge_client.train.private_trainer import TRIAL_ROWS, PrivateRuntime, find_obstacle, find_refusal
from edge_client.train.trainer import LocalResult, Trainer
from models.zoo import KerasSpec, ModelSpec
from strategies.params import Params


@dataclass(frozen=True)
class PrivateTrainer:
    """Trains one client after the other by DP-SGD."""

    runtime: PrivateRuntime

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterator[LocalResult]:
        trainer = Trainer(self.runtime, schedule.poisson_batches)
        for each in clients:
            self.runtime.expect(min(each.task.batch_size, len(each.rows)))
            yield trainer.train(params, each.task, Examples(data.x[each.rows], data.y[each.rows]), each.state)


def make_private_trainer(spec: ModelSpec, noise: dict[str, Any]) -> PrivateTrainer:
    """The trainer of a model. `noise`: `clip_norm`, `noise_multiplier` and `one_by_one` (`PrivateRuntime`)."""
    return PrivateTrainer(PrivateRuntime(spec.build(0), spec.loss, **noise))


def require_row_gradients(spec: ModelSpec | KerasSpec) -> str:
    """Why rows are differentiated one by one; empty if opacus does it at once.

    Raises:
        UserError: the model's rows have no gradients of their own.
    """
    refusal = f'privacy.mechanism = "example" cannot train model.name = {spec.name!r}: '
    if isinstance(spec, KerasSpec):
        raise UserError(f"{refusal}it is a Keras model, and the gradients of single rows are PyTorch's")
    module = spec.build(0)
    if reason := find_refusal(module):
        raise UserError(f'{refusal}{reason}, such as model.norm = "group" of resnet8')
    return find_obstacle(module, spec.loss, *spec.example_batch(TRIAL_ROWS))
