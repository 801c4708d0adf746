"""Round a ring: each process sends to the next and receives from the one before, a piece of the payload at a time.

Every process sends 2 (N-1)/N of the payload for an all-reduce, the least there is, in 2 (N-1) messages: best for long
payloads (Patarasuk 2009). Pieces are those of `tensor_split`: any length works, pieces differ by one element.
"""

from __future__ import annotations

import torch

from models.pretrain.collectives.channel import Channel, Operation


def all_reduce(channel: Channel, tensor: torch.Tensor, operation: Operation = torch.add) -> None:
    """Everybody's `tensor`, contiguous, becomes the sum of all."""
    vector = tensor.view(-1)
    reduce_scatter(channel, vector, operation)
    all_gather(channel, vector)


def reduce_scatter(channel: Channel, vector: torch.Tensor, operation: Operation = torch.add) -> None:
    """The piece of `vector` at this process's place becomes the sum of everybody's; the others hold partial sums."""
    pieces = vector.tensor_split(channel.size)
    for turn in range(1, channel.size):
        sent, added = (pieces[(channel.place - turn - late) % channel.size] for late in (0, 1))
        received = torch.empty_like(added)
        _pass_on(channel, sent, received)
        operation(added, received, out=added)


def all_gather(channel: Channel, vector: torch.Tensor) -> None:
    """`vector`, of which each process has filled the piece at its place, is filled with everybody's."""
    pieces = vector.tensor_split(channel.size)
    for turn in range(channel.size - 1):
        sent, received = (pieces[(channel.place - turn - late) % channel.size] for late in (0, 1))
        _pass_on(channel, sent, received)


def _pass_on(channel: Channel, sent: torch.Tensor, received: torch.Tensor) -> None:
    channel.exchange(sent, (channel.place + 1) % channel.size, received, (channel.place - 1) % channel.size)
