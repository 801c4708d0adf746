"""ZeRO stage 1 (Rajbhandari 2020): every process steps its share of the params and tells the others the result.

    gradients are everywhere -> each process steps the params it owns -> every owner broadcasts its own

Params stay whole on every process; optimizer state exists once. The optimizer is an ordinary one over the owned
params, so that a checkpoint finds the state of a param where the param's owner is.
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
    """An optimizer of this process's share of `parameters`, whose step leaves all of them alike on all processes."""
    shares = owned([parameter.numel() for parameter in parameters], group.size())
    owners = [[parameters[index] for index in share] for share in shares]
    mine = group.rank()
    optimizer = optimizer_of(owners[mine])

    def publish(*_: Any) -> None:
        for owner, theirs in enumerate(owners):
            _broadcast(theirs, owner, group)
            if owner != mine:
                for parameter in theirs:
                    parameter.grad = None  # its own optimizer knows of the owned ones only

    optimizer.register_step_post_hook(publish)
    return optimizer


def owned(sizes: Sequence[int], owners: int) -> list[list[int]]:
    """Which of the tensors of `sizes` values each owner has: the largest first, to whoever has least so far.

    The same everywhere, in the tensors' order. No owner has more than 4/3 of the least possible (Graham 1969).
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
