"""Pipelines that tell what they do, pass by pass. Runs in the ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.flop_counter import FlopCounterMode

from models.pretrain import (
    forward_backward,
    parallelize,
    world,
)
from models.pretrain import plan as plans
from models.pretrain.data.batches import Batch
from models.pretrain.objective import summed_cross_entropy
from models.pretrain.parallel.model.pipeline_schedule import Kind, Pass, Run
from models.pretrain.parallelize import Parallel, Stage
from models.pretrain.planner.live_memory import LiveBytes
from models.zoo import gpt

LENGTH, VOCAB, WIDTH = 32, 32, 64


@dataclass
class Log:
    """One step of one process.

    Attributes:
        max_bytes: of tensors alive after any of its passes.
    """

    passes: list[Pass] = field(default_factory=list)
    max_bytes: int = 0


def bubble(run: Run) -> float:
    """Share of the ranks' time that is idle."""
    return 1 - sum(run.busy) / (len(run.busy) * run.seconds)


def logs(texts: Sequence[str]) -> list[Log]:
    """What this process does in a step under each plan."""
    found = []
    with world.join(plans.parse(texts[0])) as first:
        for text in texts:
            here = world.build(plans.parse(text), first.device)
            spec = gpt.spec((LENGTH,), VOCAB, width=WIDTH, layers=4, heads=4)
            parallel = parallelize.parallelize(spec.build(0), spec.layout, here)
            run = forward_backward.build(parallel, summed_cross_entropy, here)
            ids = torch.arange(24 * LENGTH).reshape(24, LENGTH) % VOCAB
            log = Log()
            run(Batch(ids, ids, ids.numel()))  # torch works out shapes in the first step
            with _logged(log, here.plan, parallel):
                run(Batch(ids, ids, ids.numel()))
            found.append(log)
    return found


@contextmanager
def _logged(log: Log, plan: plans.ParallelPlan, parallel: Parallel) -> Iterator[None]:
    """Has torch's stages write into `log`. A naive split has one pipeline after the other, of one micro-batch each."""
    live = LiveBytes(parameter for part in parallel.parts for parameter in part.parameters())
    before = live.now
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    originals = {name: getattr(PipelineStage, name) for name in names}

    def reported(name: str) -> Any:
        def method(stage: PipelineStage, number: int, *args: Any, **kwargs: Any) -> Any:
            answer = originals[name](stage, number, *args, **kwargs)
            halved = name == "backward_one_chunk" and not kwargs.get("full_backward", True)
            kinds: dict[str, Kind] = dict(zip(names, ("F", "B", "W"), strict=True))
            kind: Kind = "I" if halved else kinds[name]
            if plan.schedule == "naive":
                number = sum(before.kind == kind for before in log.passes)
            log.passes.append(Pass(kind, stage.stage_index, number))
            gc.collect()
            log.max_bytes = max(log.max_bytes, live.now - before)
            return answer

        return method

    for name in names:
        setattr(PipelineStage, name, reported(name))
    try:
        with live:
            yield
    finally:
        for name, original in originals.items():
            setattr(PipelineStage, name, original)


class Masked(nn.Module):
    """(h [B, T, D], mask [B, T]) -> the same, h changed where the mask says so. The first makes the mask."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), last

    def forward(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Any:
        h, mask = x if isinstance(x, tuple) else (x, x[..., 0] > 0)
        h = h + 0.1 * self.linear(h) * mask.unsqueeze(-1)
        return h if self.last else (h, mask)


def gradient_errors(schedules: Sequence[str]) -> dict[str, float]:
    """Largest difference of this process's gradients from those of the whole model, by schedule."""
    found = {}
    with world.join(plans.parse("pp=2")) as first:
        for schedule in schedules:
            here = world.build(plans.parse(f"pp=2,schedule={schedule},microbatches=4"), first.device)
            torch.manual_seed(0)
            count = here.plan.virtual_stages
            full = nn.ModuleDict({str(n): Masked(n == count - 1) for n in range(count)})
            x, y = torch.randn(8, 3, 8), torch.randn(8, 3, 8)
            numbers = here.plan.stage_numbers(here.coordinate("pp"))
            parallel = Parallel([Stage(full, [str(number)]) for number in numbers], numbers)
            run = forward_backward.build(
                parallel, lambda given, wanted: (given - wanted).square().sum(), here
            )
            run(Batch(x, y, 1))
            mine = {n: p.grad.clone() for n, p in full.named_parameters() if p.grad is not None}
            full.zero_grad()
            h: Any = x
            for module in full.values():
                h = module(h)
            (h - y).square().sum().backward()
            of_whole = dict(full.named_parameters())
            errors = [
                float((mine[name] - grad).abs().max() / grad.abs().max())
                for name in mine
                if (grad := of_whole[name].grad) is not None
            ]
            assert len(errors) == 2 * len(numbers)
            found[schedule] = max(errors)
    return found


def multiplications() -> tuple[int, int, int]:
    """Floating-point operations of matrix products: forward, for gradients of inputs, and of weights, of one block."""
    block = gpt.Block(WIDTH, 4)
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    counts = []
    with FlopCounterMode(display=False) as counter:
        y = block(x)
        counts.append(counter.get_flop_counts()["Global"])
    with FlopCounterMode(display=False) as counter:
        _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], block.parameters())
        counts.append(counter.get_flop_counts()["Global"])
    with FlopCounterMode(display=False) as counter:
        stage_backward_weight(block.parameters(), groups)
        counts.append(counter.get_flop_counts()["Global"])
    forward, inputs, weights = (int(count[torch.ops.aten.mm]) for count in counts)
    return forward, inputs, weights
