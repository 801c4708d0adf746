"""Recursive doubling, with partners at distance 1, 2, 4, …: each exchange doubles the processes with the same sum.

`all_reduce` exchanges the whole payload log2 N times: fewest messages, best for short payloads. `all_reduce_halving`
exchanges half, a quarter, … and collects them in reverse: twice the messages, and no more bytes than the ring
(Rabenseifner's algorithm; Thakur 2005, section 4.5).

If N is not a power of two, the processes beyond the largest one below N send their payload to a partner first and
receive the sum at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.support.collectives.channel import Channel, Operation


def all_reduce(channel: Channel, tensor: torch.Tensor, operation: Operation = torch.add) -> None:
    """Replaces every process's `tensor`, contiguous, by the sum of all."""
    with _folded(channel, tensor, operation) as power:
        for bit in range(power.bit_length() - 1):
            _add_partners(channel, tensor, tensor, 1 << bit, operation)


def all_reduce_halving(channel: Channel, tensor: torch.Tensor, operation: Operation = torch.add) -> None:
    """Replaces every process's `tensor`, contiguous, by the sum of all."""
    with _folded(channel, tensor, operation) as power:
        _halve(channel, tensor.view(-1), power // 2, operation)


def _halve(channel: Channel, vector: torch.Tensor, distance: int, operation: Operation) -> None:
    if not distance:
        return
    partner = channel.place ^ distance
    mine, theirs = vector.tensor_split(2)[:: -1 if channel.place & distance else 1]
    _add_partners(channel, theirs, mine, distance, operation)
    _halve(channel, mine, distance // 2, operation)
    channel.exchange(mine, partner, theirs, partner)


def _add_partners(
    channel: Channel, sent: torch.Tensor, added: torch.Tensor, distance: int, operation: Operation
) -> None:
    partner = channel.place ^ distance
    received = torch.empty_like(added)
    channel.exchange(sent, partner, received, partner)
    operation(added, received, out=added)


@contextmanager
def _folded(channel: Channel, tensor: torch.Tensor, operation: Operation) -> Iterator[int]:
    """The number of participating processes, a power of two; 0 in those whose partner takes part for them."""
    power = 1 << (channel.size.bit_length() - 1)
    if channel.place >= power:
        channel.send(tensor, channel.place - power)
        yield 0
        channel.receive(tensor, channel.place - power)
        return
    partner = channel.place + power
    if partner < channel.size:
        received = torch.empty_like(tensor)
        channel.receive(received, partner)
        operation(tensor, received, out=tensor)
    yield power
    if partner < channel.size:
        channel.send(tensor, partner)
