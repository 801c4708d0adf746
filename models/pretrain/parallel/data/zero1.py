"""ZeRO stage 1 (Rajbhandari 2020): every process steps its share of the params and broadcasts the result.

    gradients are everywhere -> each process steps the params it owns -> every owner broadcasts its own

Every process has all params; optimizer state exists once. The optimizer is an ordinary one over the owned params, so
a checkpoint finds the state of a param at the param's owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def build(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """An optimizer of this process's share of `parameters`, whose step updates all of them on all processes."""
    shares = owned([parameter.numel() for parameter in parameters], group.size())
    owners = [[parameters[index] for index in share] for share in shares]
    mine = group.rank()
    optimizer = optimizer_of(owners[mine])

    def publish(*_: Any) -> None:
        for owner, theirs in enumerate(owners):
            _broadcast(theirs, owner, group)
            if owner != mine:
                for parameter in theirs:
                    parameter.grad = None  # this process's optimizer only knows the params it owns

    optimizer.register_step_post_hook(publish)
    return optimizer


def owned(sizes: Sequence[int], owners: int) -> list[list[int]]:
    """The tensors of these `sizes` that each owner has: the largest first, to the owner with the least so far.

    The same on all processes, in the tensors' order. No owner has more than 4/3 of the optimum (Graham 1969).
    """
    shares: list[list[int]] = [[] for _ in range(owners)]
    held = [0] * owners
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = held.index(min(held))
        shares[owner].append(index)
        held[owner] += sizes[index]
    return [sorted(share) for share in shares]


@torch.no_grad()
def _broadcast(parameters: Iterable[nn.Parameter], owner: int, group: dist.ProcessGroup) -> None:
    tensors = [parameter.detach() for parameter in parameters]
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, group=group, group_src=owner)
    if group.rank() != owner:
        for tensor, values in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))
