"""Data parallelism over rows that cannot move: every process trains on its own, and some have fewer.

A step's global batch is whatever rows the processes still have. A process that has run out continues with a row that
does not count until all have (`torch.distributed.algorithms.Join` tracks that): so its gradients are those of the
others, and its params and optimizer state, which it may own a part of, stay in step. Losses are divided by the labels
of the whole step, so no process's rows gain weight when others have ended. Works with any plan whose only axis is dp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from models.labels import PADDING
from models.pretrain.data.batches import Batch, Rows
from models.pretrain.trainer import Trainer
from models.zoo.spec import ModelSpec


def train(trainer: Trainer, own: Iterable[Rows], spec: ModelSpec) -> None:
    """Trains until the last process has no rows left.

    Args:
        own: this process's share of every step's batch, inputs and labels; may be empty, and may be any iterable.
    """
    steps = _Steps(trainer, _blank(spec))
    with Join([steps]):
        for x, y in own:
            Join.notify_join_context(steps)
            steps.take(x, y)


class _Steps(Joinable):
    """Steps that all processes take together."""

    def __init__(self, trainer: Trainer, blank: Rows) -> None:
        super().__init__()
        self.trainer, self.blank = trainer, blank

    def take(self, x: Any, y: Any) -> None:
        counted = torch.tensor(int((y != PADDING).sum()), device=self.join_device)
        dist.all_reduce(counted, group=self.join_process_group)
        batch = Batch(torch.from_numpy(x), torch.from_numpy(y).long(), max(1, int(counted)))
        self.trainer.train_on(batch)

    def join_hook(self, **_: Any) -> JoinHook:
        return _CatchUp(self)

    @property
    def join_device(self) -> torch.device:
        return self.trainer.world.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.trainer.world.group("dp")


class _CatchUp(JoinHook):
    """Takes blank steps while other processes still have rows."""

    def __init__(self, steps: _Steps) -> None:
        self.steps = steps

    def main_hook(self) -> None:
        self.steps.take(*self.steps.blank)


def _blank(spec: ModelSpec) -> Rows:
    """One row that does not count."""
    labels = spec.input_shape[:1] if spec.task == "next_token" else ()
    return np.zeros((1, *spec.input_shape), spec.input_dtype), np.full((1, *labels), PADDING, np.int32)
