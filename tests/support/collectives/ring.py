"""Ring collectives: each process sends to the next and receives from the previous, a piece of the payload at a time.

For an all-reduce every process sends 2 (N-1)/N of the payload, the minimum, in 2 (N-1) messages: best for long payloads
(Patarasuk 2009). Pieces are those of `tensor_split`: any length works, and pieces differ by at most one element.
"""

from __future__ import annotations

import torch

from tests.support.collectives.channel import Channel, Operation


def all_reduce(channel: Channel, tensor: torch.Tensor, operation: Operation = torch.add) -> None:
    """Replaces every process's `tensor`, contiguous, by the sum of all."""
    vector = tensor.view(-1)
    reduce_scatter(channel, vector, operation)
    all_gather(channel, vector)


def reduce_scatter(channel: Channel, vector: torch.Tensor, operation: Operation = torch.add) -> None:
    """Sums the piece of `vector` at this process's place over all processes; the other pieces hold partial sums."""
    pieces = vector.tensor_split(channel.size)
    for turn in range(1, channel.size):
        sent, added = (pieces[(channel.place - turn - late) % channel.size] for late in (0, 1))
        received = torch.empty_like(added)
        _pass_on(channel, sent, received)
        operation(added, received, out=added)


def all_gather(channel: Channel, vector: torch.Tensor) -> None:
    """Fills `vector`, of which each process has the piece at its place, with all pieces."""
    pieces = vector.tensor_split(channel.size)
    for turn in range(channel.size - 1):
        sent, received = (pieces[(channel.place - turn - late) % channel.size] for late in (0, 1))
        _pass_on(channel, sent, received)


def _pass_on(channel: Channel, sent: torch.Tensor, received: torch.Tensor) -> None:
    channel.exchange(sent, (channel.place + 1) % channel.size, received, (channel.place - 1) % channel.size)
