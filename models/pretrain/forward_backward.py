"""One forward and backward pass over a process's share of a batch, in micro-batches, through one module or through the
stages of a pipeline (see `models.pretrain.parallel.model.pipeline_schedule` for their order and its cost).
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

from models.pretrain.data.batches import Batch, Share
from models.pretrain.objective import Objective, router_losses
from models.pretrain.parallel.data import sharding
from models.pretrain.parallel.model.pipeline_schedule import MULTI_STAGE
from models.pretrain.parallelize import Parallel
from models.pretrain.world import World

Pass = Callable[[Batch], torch.Tensor]
"""Accumulates a batch's gradients and returns this process's share of the global batch's mean loss."""

_FORWARD = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
"""What torch's pipeline schedules do for a forward pass."""

_SINGLE_STAGE = {"naive": ScheduleGPipe, "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def share_of(world: World, batch_size: int) -> Share:
    """This process's share of every global batch; the micro-batches of a pipeline must all have the same size."""
    return Share(
        rows=world.plan.batch_shares or (1,) * world.size("dp"),
        place=world.coordinate("dp"),
        length_place=world.coordinate("cp"),
        length_shares=world.size("cp"),
        pad_to=batch_size if world.plan.pp > 1 else 0,
    )


def build(parallel: Parallel, objective: Objective, world: World) -> Pass:
    """The pass for the plan of `world`."""
    objective = _compiled(objective, world)
    if world.plan.pp > 1:
        return _pipelined(parallel, objective, world)
    return _direct(parallel.parts[0], objective, world)


def build_scoring(parallel: Parallel, objective: Objective, world: World) -> Pass:
    """A pass without gradients, which returns this process's share of what `objective` gives, summed over a batch: the
    loss, or several sums.

    The parts must be in evaluation mode. All batches have the same size.
    """
    if world.plan.pp > 1:
        return _pipelined_scoring(parallel, objective, world)
    module, plan = parallel.parts[0], world.plan

    def score(batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=world.device)
        for x, y in batch.microbatches(plan.num_microbatches):
            with _split_loss(plan.loss_parallel):
                with _precision(world):
                    logits = module(x.to(world.device, non_blocking=True))
                total = total + objective(logits, y.to(world.device, non_blocking=True))
        return total

    return torch.no_grad()(score)


def _direct(module: nn.Module, objective: Objective, world: World) -> Pass:
    """Forward and backward for every micro-batch. Gradients are synchronized with the last one only, unless they must not be
    kept whole until then."""
    plan = world.plan
    scale = world.size("data") if sharding.averages_gradients(world) else 1
    weigh_routers = router_losses([module])

    def run(batch: Batch) -> torch.Tensor:
        weigh_routers(scale / batch.global_rows)
        total = torch.zeros((), device=world.device)
        pieces = batch.microbatches(plan.num_microbatches)
        for number, (x, y) in enumerate(pieces):
            synchronized = plan.zero == 3 or number == len(pieces) - 1
            with _gradient_sync(module, synchronized), _split_loss(plan.loss_parallel):
                with _precision(world):
                    logits = module(x.to(world.device, non_blocking=True))
                loss = objective(logits, y.to(world.device, non_blocking=True)) / batch.counted
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    return run


def _pipelined(parallel: Parallel, objective: Objective, world: World) -> Pass:
    plan = world.plan
    scale = world.size("data") if sharding.averages_gradients(world) else 1
    counted = 1

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return objective(logits, y) / counted * scale

    schedule, turns = _schedule(parallel, loss, world)
    weigh_routers = router_losses(parallel.parts)

    def run(batch: Batch) -> torch.Tensor:
        nonlocal counted
        weigh_routers(scale / batch.global_rows)
        counted = batch.counted
        total = torch.zeros((), device=world.device)
        for x, y in batch.microbatches(turns):
            inputs, targets, losses = _given(x, y, parallel, world)
            with _split_loss(plan.loss_parallel), _precision(world):
                # the logits of all micro-batches are not needed, and would stay in memory
                schedule.step(*inputs, **targets, return_outputs=False)
            total += sum(each.detach() for each in losses) / scale
        return total

    return run


def _pipelined_scoring(parallel: Parallel, objective: Objective, world: World) -> Pass:
    plan = world.plan
    schedule, turns = _schedule(parallel, objective, world)
    if plan.schedule in MULTI_STAGE:
        # `eval` would go through the backward passes too, which fail where two stages of a V meet on one rank
        orders = schedule.pipeline_order_with_comms
        schedule.pipeline_order_with_comms = {
            rank: [action for action in order if action.computation_type.name in _FORWARD]
            for rank, order in orders.items()
        }

    def score(batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=world.device)
        for x, y in batch.microbatches(turns):
            inputs, targets, losses = _given(x, y, parallel, world)
            with _split_loss(plan.loss_parallel), _precision(world):
                schedule.eval(*inputs, **targets, return_outputs=False)
            total = total + sum(losses)
        return total

    return torch.no_grad()(score)


def _given(
    x: torch.Tensor, y: torch.Tensor, parallel: Parallel, world: World
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], list[torch.Tensor]]:
    """What this process's stages get of a batch: rows for the first stage, labels for the last; and the losses, which the last writes."""
    losses: list[torch.Tensor] = []
    inputs = (x.to(world.device, non_blocking=True),) if 0 in parallel.numbers else ()
    if world.plan.virtual_stages - 1 not in parallel.numbers:
        return inputs, {}, losses
    return inputs, {"target": y.to(world.device, non_blocking=True), "losses": losses}, losses


def _schedule(parallel: Parallel, loss: Objective, world: World) -> tuple[Any, int]:
    """Torch's schedule of this process's stages, and how many times it runs for one batch."""
    plan = world.plan
    stages = [
        _stage(part, number, world) for part, number in zip(parallel.parts, parallel.numbers, strict=True)
    ]
    turns = plan.num_microbatches if plan.schedule == "naive" else 1
    options: dict[str, Any] = {
        "n_microbatches": plan.num_microbatches // turns,
        "loss_fn": loss,
        "scale_grads": False,
    }
    if plan.schedule in MULTI_STAGE:
        return MULTI_STAGE[plan.schedule](stages, **options), turns
    return _SINGLE_STAGE[plan.schedule](stages[0], **options), turns


class HostBoundary(nn.Module):
    """A stage on its own kind of processor: its inputs and outputs are in host memory, where gloo can send them."""

    def __init__(self, stage: nn.Module, device: torch.device, last: bool) -> None:
        super().__init__()
        self.stage, self.device, self.last = stage, device, last

    def forward(self, *inputs: torch.Tensor) -> Any:
        output = self.stage(*(part.to(self.device) for part in inputs))
        if self.last:  # the loss is computed where the logits are
            return output
        return tuple(part.cpu() for part in output) if isinstance(output, tuple) else output.cpu()


class ShardedStage(nn.Module):
    """A stage whose params are gathered layer by layer, and whose gradients are sharded with every micro-batch.

    Torch's pipelines keep both whole from the first micro-batch to the last where they see that FSDP2 shards the stage itself.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.stage(*inputs)


def _stage(part: nn.Module, number: int, world: World) -> PipelineStage:
    plan, device = world.plan, world.device
    if plan.zero == 3 and isinstance(part, FSDPModule):
        part = ShardedStage(part)
    if plan.devices:
        part, device = HostBoundary(part, device, number == plan.virtual_stages - 1), torch.device("cpu")
    return PipelineStage(part, number, plan.virtual_stages, device, group=world.group("pp"))


def _gradient_sync(module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Synchronizes gradients in this micro-batch's backward pass only if `enabled`."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
    elif isinstance(module, DistributedDataParallel) and not enabled:
        return module.no_sync()
    return nullcontext()


def _compiled(objective: Objective, world: World) -> Objective:
    """The loss as one kernel, which never writes float32 logits, if blocks are compiled too; where it was measured: on a GPU."""
    plan = world.plan
    if not plan.compile or plan.loss_parallel or world.device.type != "cuda":
        return objective
    compiled: Objective = torch.compile(objective)
    return compiled


def _split_loss(enabled: bool) -> AbstractContextManager[None]:
    return loss_parallel() if enabled else nullcontext()


def _precision(world: World) -> AbstractContextManager[None]:
    """Autocast to bfloat16, where sharding does not cast params itself."""
    if world.plan.precision != "fp32" and world.plan.zero < 2:
        return torch.autocast(world.device.type, dtype=torch.bfloat16)
    return nullcontext()
