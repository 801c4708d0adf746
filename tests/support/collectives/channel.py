"""Sending and receiving between the processes of one group, with a count of what is sent.

Algorithms know their processes by place, 0 to size - 1. `subgroup` gives some of them places of their own, as the rows
and columns of a mesh need, with the same count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

Operation = Callable[..., torch.Tensor]
"""Elementwise, commutative and associative, with `out`: `torch.add`, `torch.maximum` and the like."""


@dataclass
class Traffic:
    """Messages and bytes sent by one process."""

    messages: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class Channel:
    """One process's view of a group.

    Attributes:
        ranks: rank in torch's default group, by place.
        place: place of this process.
    """

    ranks: tuple[int, ...]
    place: int
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def subgroup(self, places: Sequence[int]) -> Channel:
        """The group of these places, which must include this process's."""
        return Channel(
            tuple(self.ranks[place] for place in places), list(places).index(self.place), self.traffic
        )

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Sends `tensor`, contiguous, to the process at place `to`, unless it is empty."""
        for request in self._sending(tensor, to):
            request.wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fills `tensor`, contiguous and of the shape that was sent."""
        for request in self._receiving(tensor, source):
            request.wait()

    def exchange(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> None:
        """Sends and receives at once, so that processes that all send first do not deadlock."""
        for request in (*self._receiving(received, source), *self._sending(sent, to)):
            request.wait()

    def _sending(self, tensor: torch.Tensor, to: int) -> list[dist.Work]:
        if not tensor.numel():
            return []
        self.traffic.messages += 1
        self.traffic.sent_bytes += tensor.numel() * tensor.element_size()
        return [_request(dist.isend(tensor, self.ranks[to]))]

    def _receiving(self, tensor: torch.Tensor, source: int) -> list[dist.Work]:
        return [_request(dist.irecv(tensor, self.ranks[source]))] if tensor.numel() else []


def default_channel() -> Channel:
    """All processes of torch's default group, each at the place of its rank."""
    return Channel(tuple(range(dist.get_world_size())), dist.get_rank())


def _request(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None only outside the group
    return work
