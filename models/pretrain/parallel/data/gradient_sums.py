"""Sums gradients over the data axis where neither DistributedDataParallel nor FSDP does: with tp, pp or ep.

    the backward pass accumulates a param's last gradient -> its bucket is complete -> all-reduce, while the pass goes on
    -> after the pass: the buckets that are left, then every sum is copied back

as in DistributedDataParallel (Li 2020, section 3.2). Buckets are in the reverse order of the params, about that of their
gradients, and are sent in this order, whichever is complete first: all processes must send the same.

A schedule that computes gradients of weights apart from those of inputs (zero-bubble, zbv) adds them up without telling
the params, so that all of its buckets are sent after the pass. So are gradients of expert shards, which are summed over the
processes with the same experts: the others' tokens came to them. With zero=2 and 3 FSDP has averaged these over the replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from models.pretrain.dtensor import local_tensor
from models.pretrain.parallel.data import buckets as bucket_sizes
from models.pretrain.parallel.data import sharding
from models.pretrain.parallel.model import experts, tensor
from models.pretrain.world import World


@dataclass
class Bucket:
    """Params whose gradients are summed together.

    Attributes:
        missing: how many of them still wait for gradients of this step.
        sent: the gradients, one after the other, while they are summed.
    """

    parameters: list[nn.Parameter]
    missing: int = 0
    sent: tuple[list[torch.Tensor], torch.Tensor, dist.Work] | None = None


class GradientSums:
    """Call `finish` after every backward pass.

    Args:
        overlap: whether to send buckets during the pass.
    """

    def __init__(self, parts: Sequence[nn.Module], world: World, *, overlap: bool = True) -> None:
        self.parts, self.world, plan = list(parts), world, world.plan
        self._sums = world.size("data") > 1 and not sharding.averages_gradients(world)
        trained = [p for part in parts for p in part.parameters() if p.requires_grad]
        of_experts = {id(p) for part in experts.sharded(parts) for p in part.parameters()}
        self._experts = [p for p in trained if id(p) in of_experts]
        others = [p for p in reversed(trained) if id(p) not in of_experts] if self._sums else []
        self._buckets = _buckets(others)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._passes: dict[int, int] = {}
        self._next = 0
        self._reset()
        if overlap and (plan.pp == 1 or plan.schedule not in ("zero-bubble", "zbv")):
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Replaces every gradient by its sum over the data axis, and lays it out like its param. A collective."""
        if not self._sums:
            if self.world.size("tp") > 1:
                tensor.align_gradients(p for part in self.parts for p in part.parameters())
            self._sum_experts()
            return
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        self._sum_experts()
        for bucket in self._buckets:
            _receive(bucket.sent)
        self._reset()

    def _sum_experts(self) -> None:
        if not self._experts:
            return
        world, averaged = self.world, self.world.plan.zero >= 2
        tensor.align_gradients(self._experts)
        gradients = [local_tensor(p.grad) for p in self._experts if p.grad is not None]
        if averaged and gradients:  # losses are scaled by the size of the data axis
            torch._foreach_div_(gradients, world.size("shard") * world.size("cp"))
        for axis in ("cp",) if averaged else ("replicate", "cp"):
            if world.size(axis) > 1:
                for bucket in _buckets(self._experts):
                    _receive(_sent(bucket.parameters, world.group(axis)))

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Called in the backward pass, once for each micro-batch."""
        self._passes[id(parameter)] = passes = self._passes.get(id(parameter), 0) + 1
        if passes < self.world.plan.num_microbatches:
            return
        self._bucket_of[id(parameter)].missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        tensor.align_gradients(bucket.parameters)
        bucket.sent = _sent(bucket.parameters, self.world.group("data"))

    def _reset(self) -> None:
        self._passes.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.missing, bucket.sent = len(bucket.parameters), None


def _buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    sizes = [local_tensor(p.detach()).nbytes for p in parameters]
    most = bucket_sizes.limit(sum(sizes))
    buckets: list[Bucket] = []
    size: float = most
    for parameter, size_bytes in zip(parameters, sizes, strict=True):
        if size >= most:
            buckets.append(Bucket([]))
            size = 0
        buckets[-1].parameters.append(parameter)
        size += size_bytes
    return buckets


def _sent(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup
) -> tuple[list[torch.Tensor], torch.Tensor, dist.Work] | None:
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return None
    flat = torch.cat([each.reshape(-1) for each in gradients])
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return gradients, flat, work


def _receive(sent: tuple[list[torch.Tensor], torch.Tensor, dist.Work] | None) -> None:
    if sent is None:
        return
    gradients, flat, work = sent
    work.wait()
    for each, summed in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        each.copy_(summed.view_as(each))
