"""The scores of a model under the plan of its training: the loss on rows held out of the training set, during it, and all
figures on the test set, at its end.

Every process scores its share of the rows, with the parts it trains, and the shares are summed: no process needs the
whole model, and the figure is that of one process. It changes nothing in the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from edge_client.wire.quantities import QuantitySums, figures
from models.labels import counting
from models.pretrain import evaluation, freezing
from models.pretrain.data.batches import Source
from models.pretrain.data.held_out import OrderedBatches
from models.pretrain.dtensor import full_tensor, local_tensor
from models.pretrain.evaluation import Scores
from models.pretrain.forward_backward import Pass, build_scoring, share_of
from models.pretrain.objective import objective_of
from models.pretrain.world import World
from models.zoo.spec import ModelSpec

if TYPE_CHECKING:
    from models.pretrain.trainer import Trainer

_LOGITS = 2**22
"""Logits of one batch that need no care."""


@dataclass(frozen=True)
class Validation:
    """Scores the model of a training on `source`.

    Attributes:
        heartbeat: called before every batch.
    """

    training: Trainer
    source: Source
    score: Pass
    heartbeat: Callable[[], None] = lambda: None

    def due(self, step: int) -> bool:
        """Whether to score the model after so many steps."""
        return step % self.training.options.validate_every == 0 or step == self.training.steps

    def loss(self) -> float:
        """Mean loss of the labels that count, on every process. A collective."""
        batch_size = self.training.batches.batch_size
        total, counted = _summed(self.training, self.source, batch_size, self.score, 1, self.heartbeat)
        return float(total) / max(1, counted)


def build(
    training: Trainer, spec: ModelSpec, source: Source, heartbeat: Callable[[], None] = lambda: None
) -> Validation:
    """The validation of a training on the rows of `source`."""
    score = build_scoring(training.parallel, objective_of(spec), training.world)
    return Validation(training, source, score, heartbeat)


def final_scores(training: Trainer, spec: ModelSpec, source: Source) -> Scores:
    """The scores on all rows of `source`, on every process. A collective.

    Rows are scored in batches of a training's size, or of more where their logits are few. Params and precision are those
    of the training, whose gradients are dropped.
    """
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    objective, quantities = objective_of(spec), spec.task == "regression"

    def measure(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss, full = objective(logits, y), full_tensor(logits)
        if quantities:
            labels, counted = y.double(), counting(y)
            errors = (full.double().squeeze(-1) - labels)[counted].abs().sum()
            return torch.stack([loss.double(), errors, labels[counted].sum(), labels[counted].square().sum()])
        hits = ((full.argmax(-1) == y) & counting(y)).sum()
        return torch.stack([loss.double(), hits.double()])

    rows = max(training.batches.batch_size, min(evaluation.ROWS, _LOGITS // math.prod(spec.logits_shape)))
    score = build_scoring(training.parallel, measure, training.world)
    # compiling again, for rows of another number, takes longer
    eager = torch.compiler.set_stance("force_eager") if training.world.plan.compile else nullcontext()
    with eager:
        sums, counted = _summed(training, source, rows, score, 4 if quantities else 2)
    loss, hits_or_errors, *of_labels = sums.tolist()
    if not quantities:
        return Scores(loss / max(1, counted), hits_or_errors / max(1, counted))
    return Scores(
        loss / max(1, counted), None, figures(counted, loss, QuantitySums(hits_or_errors, *of_labels))
    )


def _summed(
    training: Trainer,
    source: Source,
    batch_size: int,
    score: Pass,
    size: int,
    heartbeat: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, int]:
    """What `score` returns, a number or [size], summed over all rows and processes, and the number of labels that
    count. A collective."""
    world = training.world
    batches = OrderedBatches(source, batch_size, training.identity.seed, share_of(world, batch_size))
    total, counted = torch.zeros(size, dtype=torch.float64, device=world.device), 0
    with _scored(training):
        for step in range(batches.steps_per_epoch):
            heartbeat()
            total += score(batches[step])
            counted += source.counted(batches.rows(step))
    if world.coordinate("tp"):
        total.zero_()  # every tp rank computed the same
    dist.all_reduce(total)
    return total, counted


@contextmanager
def _scored(training: Trainer) -> Iterator[None]:
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
