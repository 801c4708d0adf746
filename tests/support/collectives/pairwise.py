"""All-to-all: in turn t, every process sends to the one t places on and receives from the one t places back."""

from __future__ import annotations

import torch

from tests.support.collectives.channel import Channel


def all_to_all(channel: Channel, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Row p of `sent`, [size, …], goes to place p, which stores it in the row of this process's place of `received`."""
    received[channel.place] = sent[channel.place]
    for turn in range(1, channel.size):
        to, source = ((channel.place + way * turn) % channel.size for way in (1, -1))
        channel.exchange(sent[to], to, received[source], source)
