"""All-reduce along the rows and columns of a mesh, each a ring; a column sums only what its row left to it.

It sends as few bytes as one ring of all, in fewer messages: 2 (rows + columns - 2). Rows that are hosts send
1 / columns of the payload between hosts from every process.
"""

from __future__ import annotations

import torch

from tests.support.collectives import ring
from tests.support.collectives.channel import Channel, Operation
from tests.support.collectives.cost import columns


def all_reduce(channel: Channel, tensor: torch.Tensor, operation: Operation = torch.add) -> None:
    """Replaces every process's `tensor`, contiguous, by the sum of all. The mesh is as square as possible."""
    width = columns(channel.size)
    start = channel.place - channel.place % width
    row = channel.subgroup(range(start, start + width))
    column = channel.subgroup(range(channel.place % width, channel.size, width))
    vector = tensor.view(-1)
    ring.reduce_scatter(row, vector, operation)
    ring.all_reduce(column, vector.tensor_split(width)[row.place], operation)
    ring.all_gather(row, vector)
