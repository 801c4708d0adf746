"""Collectives along a binomial tree: every round of messages doubles the processes that have the payload.

ceil(log2 N) messages deep, so best for short payloads (Thakur 2005, sections 3 and 4). In binary, a node's parent is
its number without the lowest 1; its subtree is the numbers up to the next with as many trailing zeros.
"""

from __future__ import annotations

import torch

from tests.support.collectives.channel import Channel, Operation


def broadcast(channel: Channel, tensor: torch.Tensor, root: int = 0) -> None:
    """Replaces every process's `tensor`, contiguous, by that of the process at place `root`."""
    node = _node(channel, root)
    if node:
        channel.receive(tensor, _place(channel, _parent(node), root))
    for child in _children(node, channel.size):
        channel.send(tensor, _place(channel, child, root))


def reduce(channel: Channel, tensor: torch.Tensor, root: int = 0, operation: Operation = torch.add) -> None:
    """Sums all processes' tensors into the `tensor` of `root`; those of the others hold partial sums."""
    node = _node(channel, root)
    for child in reversed(_children(node, channel.size)):
        received = torch.empty_like(tensor)
        channel.receive(received, _place(channel, child, root))
        operation(tensor, received, out=tensor)
    if node:
        channel.send(tensor, _place(channel, _parent(node), root))


def all_reduce(channel: Channel, tensor: torch.Tensor, operation: Operation = torch.add) -> None:
    """Replaces every process's `tensor`, contiguous, by the sum of all: up the tree and down again."""
    reduce(channel, tensor, operation=operation)
    broadcast(channel, tensor)


def gather(channel: Channel, tensor: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """All processes' tensors of one shape at `root`, [size, *shape] in order of places; None elsewhere."""
    node = _node(channel, root)
    gathered = tensor.new_empty((_below(node, channel.size), *tensor.shape))
    gathered[0] = tensor
    for child in reversed(_children(node, channel.size)):
        theirs = gathered[child - node : child - node + _below(child, channel.size)]
        channel.receive(theirs, _place(channel, child, root))
    if not node:
        return gathered.roll(root, 0)
    channel.send(gathered, _place(channel, _parent(node), root))
    return None


def scatter(channel: Channel, tensors: torch.Tensor | None, own: torch.Tensor, root: int = 0) -> None:
    """Fills `own` with this process's row of `tensors`, [size, *shape], which only `root` needs to have."""
    node = _node(channel, root)
    if node:
        held = own.new_empty((_below(node, channel.size), *own.shape))
        channel.receive(held, _place(channel, _parent(node), root))
    else:
        assert tensors is not None  # the root's
        held = tensors.roll(-root, 0)
    for child in _children(node, channel.size):
        theirs = held[child - node : child - node + _below(child, channel.size)]
        channel.send(theirs, _place(channel, child, root))
    own.copy_(held[0])


def _node(channel: Channel, root: int) -> int:
    """This process's number in the tree whose node 0 is `root`."""
    return (channel.place - root) % channel.size


def _place(channel: Channel, node: int, root: int) -> int:
    return (node + root) % channel.size


def _parent(node: int) -> int:
    return node & (node - 1)


def _children(node: int, size: int) -> list[int]:
    """Children, the one with the largest subtree first: it has the most to pass on."""
    reach = node & -node if node else 1 << (size - 1).bit_length()
    steps = [1 << bit for bit in reversed(range(reach.bit_length() - 1))]
    return [node + step for step in steps if node + step < size]


def _below(node: int, size: int) -> int:
    """Size of this node's subtree, itself included; its nodes are consecutive."""
    return min(node & -node, size - node) if node else size
