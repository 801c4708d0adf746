"""Collectives that FSDP2 uses on CPUs, which hold nothing but what they are given, and one shard.

Gloo's own all-gather writes into a copy as large as the result, and its reduce-scatter reduces the whole of a copy of its
input. These send from and receive into the tensors themselves:

    all-gather       every process broadcasts its shard to where it belongs
    reduce-scatter   a ring (Patarasuk 2009): each process adds its part to what it received, and sends the sum on

For the same result the ring sends half as much as a reduction of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


def use(module: nn.Module) -> None:
    """Makes `module`, which FSDP2 shards, and all in it hold the params of one layer at a time: gathered when they are
    needed, through these collectives, and not before, because nothing on a CPU overlaps with computing."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part._set_unshard_async_op(True)  # so that the buffer is freed before the next layer is gathered
            part.set_custom_all_gather(_Broadcasts())
            part.set_custom_reduce_scatter(_Ring())
            part.set_modules_to_backward_prefetch([part])  # itself, not the layer before


class _Allocated:
    """Buffers in ordinary memory."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Broadcasts(_Allocated, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fills `output_tensor` [processes · n] with the shards [n] of all; `input_tensor` is its part of this process."""
        shards = output_tensor.chunk(group.size())
        works = [
            dist.broadcast(shard, group=group, group_src=rank, async_op=True)
            for rank, shard in enumerate(shards)
        ]
        together = _Together([work for work in works if work is not None])
        if async_op:
            return together
        together.wait()
        return None


class _Together(dist.Work):
    """Several pieces of work as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self.works:
            work.wait(timeout)
        return True


class _Ring(_Allocated, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fills `output_tensor` [n] with this process's part of the sum, or the mean, of every process's `input_tensor`
        [processes · n], which serves as working memory."""
        count, rank = group.size(), group.rank()
        parts = input_tensor.chunk(count)
        for step in range(1, count):
            sent, added = parts[(rank - step) % count], parts[(rank - step - 1) % count]
            receiving = dist.irecv(output_tensor, group=group, group_src=(rank - 1) % count)
            sending = dist.isend(sent, group=group, group_dst=(rank + 1) % count)
            assert receiving is not None and sending is not None  # this process is one of the group
            receiving.wait()
            added += output_tensor
            sending.wait()
        output_tensor.copy_(parts[rank])
        if op == dist.ReduceOp.AVG:
            output_tensor /= count
        # FSDP2 keeps the tensor until the gradients of the next layer.
        input_tensor.untyped_storage().resize_(0)
        return None
