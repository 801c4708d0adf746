"""Hierarchical all-reduce: a reduction inside every host, a ring between the hosts' first processes, a broadcast inside.

The payload crosses between hosts 2 (H-1)/H times for each of H hosts, whatever runs inside them.
"""

from __future__ import annotations

import torch

from tests.support.collectives import ring, tree
from tests.support.collectives.channel import Channel, Operation


def all_reduce(
    channel: Channel, tensor: torch.Tensor, per_host: int, operation: Operation = torch.add
) -> None:
    """Replaces every process's `tensor` by the sum of all. Hosts have `per_host` places each, the last the rest."""
    first = channel.place - channel.place % per_host
    host = channel.subgroup(range(first, min(first + per_host, channel.size)))
    tree.reduce(host, tensor, operation=operation)
    if channel.place == first:
        ring.all_reduce(channel.subgroup(range(0, channel.size, per_host)), tensor, operation)
    tree.broadcast(host, tensor)
