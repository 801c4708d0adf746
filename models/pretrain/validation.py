"""The loss on rows held out of the training set, during a training and under its plan.

Every process scores its share of the rows, with the parts it trains, and the shares are summed: no process needs the
whole model, and the figure is that of one process. It changes nothing in the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from models.pretrain import freezing, trainer
from models.pretrain.data.batches import Source
from models.pretrain.data.held_out import OrderedBatches
from models.pretrain.dtensor import local_tensor
from models.pretrain.forward_backward import Pass, build_scoring
from models.pretrain.objective import objective_of
from models.pretrain.world import World
from models.zoo.spec import ModelSpec


@dataclass(frozen=True)
class Validation:
    """Scores the model of a training on `source`.

    Attributes:
        heartbeat: called before every batch.
    """

    training: trainer.Trainer
    source: Source
    score: Pass
    heartbeat: Callable[[], None] = lambda: None

    def due(self, step: int) -> bool:
        """Whether to score the model after so many steps."""
        return step % self.training.options.validate_every == 0 or step == self.training.steps

    def loss(self) -> float:
        """Mean loss of the labels that count, on every process. A collective."""
        training, world = self.training, self.training.world
        batches = OrderedBatches(
            self.source, training.batches.batch_size, training.identity.seed, training.batches.share
        )
        total, counted = torch.zeros((), device=world.device), 0
        with _scored(training):
            for step in range(batches.steps_per_epoch):
                self.heartbeat()
                batch = batches[step]
                total += self.score(batch)
                counted += self.source.counted(batches.rows(step))
        if world.coordinate("tp"):
            total.zero_()  # every tp rank computed the same loss
        dist.all_reduce(total)
        return float(total) / max(1, counted)


def build(
    training: trainer.Trainer, spec: ModelSpec, source: Source, heartbeat: Callable[[], None] = lambda: None
) -> Validation:
    """The validation of a training on the rows of `source`."""
    score = build_scoring(training.parallel, objective_of(spec), training.world)
    return Validation(training, source, score, heartbeat)


@contextmanager
def _scored(training: trainer.Trainer) -> Iterator[None]:
    """Puts the parts in evaluation mode, with the params and buffers that other plans would resume from."""
    parts = training.parallel.parts
    synchronized = {} if training.local is None else training.local.synchronized()
    _share_buffers(parts, training.world)
    for part in parts:
        part.eval()
    try:
        with _values(parts, synchronized):
            yield
    finally:
        for part in parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a pass without gradients may leave params unsharded
            part.train()
        freezing.set_eval_mode(parts, training.options)


@contextmanager
def _values(parts: Sequence[nn.Module], values: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """The parts with other values of the params that `values` has by `id`."""
    changed = [p for part in parts for p in part.parameters() if id(p) in values]
    before = [local_tensor(p.detach()).clone() for p in changed]
    try:
        for parameter in changed:
            local_tensor(parameter.detach()).copy_(local_tensor(values[id(parameter)]))
        yield
    finally:
        for parameter, value in zip(changed, before, strict=True):
            local_tensor(parameter.detach()).copy_(value)


def _share_buffers(parts: Sequence[nn.Module], world: World) -> None:
    """Running statistics are each process's own; the model has those of the first, and training uses none."""
    if world.size("data") == 1:
        return
    for part in parts:
        if isinstance(part, DistributedDataParallel):
            continue  # it does so itself
        for buffer in part.buffers():
            dist.broadcast(buffer, group=world.group("data"), group_src=0)
