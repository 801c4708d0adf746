"""One forward and backward pass over a process's share of a batch, in micro-batches: through one module, or through
the stages of a pipeline (`models.pretrain.model_parallel.timetable` says in which order, and what that costs).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from models.pretrain.data.batches import Batch
from models.pretrain.data_parallel import sharding
from models.pretrain.model_parallel.timetable import SEVERAL_STAGES
from models.pretrain.objective import Objective
from models.pretrain.parallelize import Parallel
from models.pretrain.world import World

Pass = Callable[[Batch], torch.Tensor]
"""Adds a batch's gradients to the parts' and gives this process's share of the global batch's mean loss."""

_ONE_STAGE = {"naive": ScheduleGPipe, "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def build(parallel: Parallel, objective: Objective, world: World) -> Pass:
    """The pass that the plan of `world` asks for."""
    if world.plan.pp > 1:
        return _pipelined(parallel, objective, world)
    return _direct(parallel.parts[0], objective, world)


def _direct(module: nn.Module, objective: Objective, world: World) -> Pass:
    """Every micro-batch forward and backward; gradients travel with the last one only."""
    plan = world.plan
    scale = world.size("data") if sharding.averages(world) else 1

    def run(batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=world.device)
        pieces = batch.pieces(plan.pieces)
        for number, (x, y) in enumerate(pieces):
            with _exchanging(module, number == len(pieces) - 1), _split_loss(plan.loss_parallel):
                with _precision(world):
                    logits = module(x.to(world.device, non_blocking=True))
                loss = objective(logits, y.to(world.device, non_blocking=True)) / batch.counted
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    return run


def _pipelined(parallel: Parallel, objective: Objective, world: World) -> Pass:
    plan = world.plan
    scale = world.size("data") if sharding.averages(world) else 1
    counted = 1

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return objective(logits, y) / counted * scale

    stages = [
        _stage(part, number, world) for part, number in zip(parallel.parts, parallel.numbers, strict=True)
    ]
    turns = plan.pieces if plan.schedule == "naive" else 1
    options: dict[str, Any] = {"n_microbatches": plan.pieces // turns, "loss_fn": loss, "scale_grads": False}
    schedule = (
        SEVERAL_STAGES[plan.schedule](stages, **options)
        if plan.schedule in SEVERAL_STAGES
        else _ONE_STAGE[plan.schedule](stages[0], **options)
    )
    first, last = 0 in parallel.numbers, plan.virtual_stages - 1 in parallel.numbers

    def run(batch: Batch) -> torch.Tensor:
        nonlocal counted
        counted = batch.counted
        total = torch.zeros((), device=world.device)
        for x, y in batch.pieces(turns):
            losses: list[torch.Tensor] = []
            inputs = (x.to(world.device, non_blocking=True),) if first else ()
            targets: dict[str, Any] = (
                {"target": y.to(world.device, non_blocking=True), "losses": losses} if last else {}
            )
            with _split_loss(plan.loss_parallel), _precision(world):
                # nobody needs the logits of all micro-batches, which would outlive them
                schedule.step(*inputs, **targets, return_outputs=False)
            total += sum(each.detach() for each in losses) / scale
        return total

    return run


class Hosted(nn.Module):
    """A stage on a processor of its own kind: what comes and goes is in the host's memory, where gloo can send it."""

    def __init__(self, stage: nn.Module, device: torch.device, last: bool) -> None:
        super().__init__()
        self.stage, self.device, self.last = stage, device, last

    def forward(self, *inputs: torch.Tensor) -> Any:
        answer = self.stage(*(part.to(self.device) for part in inputs))
        if self.last:  # the loss is computed where the logits are
            return answer
        return tuple(part.cpu() for part in answer) if isinstance(answer, tuple) else answer.cpu()


def _stage(part: nn.Module, number: int, world: World) -> PipelineStage:
    plan, device = world.plan, world.device
    if plan.devices:
        part, device = Hosted(part, device, number == plan.virtual_stages - 1), torch.device("cpu")
    return PipelineStage(part, number, plan.virtual_stages, device, group=world.group("pp"))


def _exchanging(module: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Gradients are exchanged in this piece's backward pass only if `now`."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
    elif isinstance(module, DistributedDataParallel) and not now:
        return module.no_sync()
    return nullcontext()


def _split_loss(wanted: bool) -> AbstractContextManager[None]:
    return loss_parallel() if wanted else nullcontext()


def _precision(world: World) -> AbstractContextManager[None]:
    """Autocast to bfloat16, where sharding does not cast params itself."""
    if world.plan.precision == "bf16" and world.plan.zero < 2:
        return torch.autocast(world.device.type, dtype=torch.bfloat16)
    return nullcontext()
