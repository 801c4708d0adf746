"""Inside hosts first: the first process of each collects its host's sum, these add up in a ring, and spread it again.

The payload crosses between hosts 2 (H-1)/H times for each of H hosts, whatever runs inside them.
"""

from __future__ import annotations

import torch

from models.pretrain.collectives import ring, tree
from models.pretrain.collectives.channel import Channel, Operation


def all_reduce(
    channel: Channel, tensor: torch.Tensor, per_host: int, operation: Operation = torch.add
) -> None:
    """Everybody's `tensor`, contiguous, becomes the sum of all. Hosts have `per_host` places each, the last the rest."""
    first = channel.place - channel.place % per_host
    host = channel.among(range(first, min(first + per_host, channel.size)))
    tree.reduce(host, tensor, operation=operation)
    if channel.place == first:
        ring.all_reduce(channel.among(range(0, channel.size, per_host)), tensor, operation)
    tree.broadcast(host, tensor)
