"""Context parallelism: every process has a part of every sequence; around attention it is exchanged for a part of the
heads over the whole sequence (Jacobs 2023, DeepSpeed Ulysses). Where processes are more than the heads of keys and values, these
are repeated, so that each process has the one that its queries need.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from models.pretrain.world import World
from models.zoo.layout import Layout, matching


class ByHead(nn.Module):
    """Attention over parts of sequences: [B, H, T/P, D] in and out; the inner module sees [B, H/P, T, D]."""

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self._to_sequences(self.inner(*(self._to_heads(part) for part in (query, key, value))))

    def _to_heads(self, x: torch.Tensor) -> torch.Tensor:
        B, H, T, D = x.shape
        P = self.group.size()
        if repeats := P // math.gcd(P, H) - 1:
            x, H = x.repeat_interleave(repeats + 1, 1), H * (repeats + 1)
        sent = x.reshape(B, P, H // P, T, D).permute(1, 3, 0, 2, 4).contiguous()  # [P, T, B, H/P, D]
        got = all_to_all_single_autograd(sent, None, None, self.group)
        return got.reshape(P * T, B, H // P, D).permute(1, 2, 0, 3)

    def _to_sequences(self, x: torch.Tensor) -> torch.Tensor:
        B, H, T, D = x.shape
        P = self.group.size()
        sent = x.permute(2, 0, 1, 3).reshape(P, T // P, B, H, D).contiguous()
        got = all_to_all_single_autograd(sent, None, None, self.group)  # [P, T/P, B, H, D]
        return got.permute(2, 0, 3, 1, 4).reshape(B, P * H, T // P, D)


def split(module: nn.Module, layout: Layout, world: World) -> None:
    """Makes attention of `module` exchange heads and sequence, sets the embedding's offset of its part, and makes routers
    count the tokens of whole rows."""
    group = world.group("cp")
    for name, inner in list(matching(module, layout.attention)):
        module.set_submodule(name, ByHead(inner, group))
    for part in module.modules():
        if hasattr(part, "offset"):
            setattr(part, "offset", world.coordinate("cp") * (layout.length // group.size()))  # noqa: B010
    for _, part in matching(module, layout.balance):
        setattr(part, "total", partial(_sum, group=group))  # noqa: B010


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the processes' `x`, without a gradient."""
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total
