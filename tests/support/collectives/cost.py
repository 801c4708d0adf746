"""The cost of the other algorithms, beside the rings that a planner counts on (`collective_cost`): trees, meshes,
doubling and hierarchies of hosts. Formulas are those of Thakur 2005, table 1 and section 4; the counts of messages and
bytes are what `channel.Traffic` measures where the payload divides evenly.

`payload_bytes` is what one process has at the end (broadcast, gather, all-reduce) or had at the start (reduce,
scatter): the larger of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from models.pretrain.planner import collective_cost
from models.pretrain.planner.collective_cost import Link

Algorithm = Literal["ring", "tree", "mesh", "doubling", "halving", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class Cost(collective_cost.Cost):
    """`all_messages`, `all_bytes`: sent by all processes together."""

    all_messages: float
    all_bytes: float

    def __add__(self, other: collective_cost.Cost) -> Cost:
        assert isinstance(other, Cost)
        chain = super().__add__(other)
        return Cost(
            chain.messages,
            chain.sent_bytes,
            chain.reduced_bytes,
            self.all_messages + other.all_messages,
            self.all_bytes + other.all_bytes,
        )


def of_all(processes: int, cost: collective_cost.Cost) -> Cost:
    """`cost`, of a ring or of pairs, where every process sends as much."""
    messages, sent_bytes = cost.messages, cost.sent_bytes
    return Cost(messages, sent_bytes, cost.reduced_bytes, processes * messages, processes * sent_bytes)


def broadcast(processes: int, payload_bytes: float) -> Cost:
    """Binomial tree."""
    depth = _doublings(processes)
    others = processes - 1
    return Cost(depth, depth * payload_bytes, 0, others, others * payload_bytes)


def reduce(processes: int, payload_bytes: float) -> Cost:
    """Binomial tree."""
    depth = _doublings(processes)
    others = processes - 1
    return Cost(depth, depth * payload_bytes, depth * payload_bytes, others, others * payload_bytes)


def gather(processes: int, payload_bytes: float) -> Cost:
    """Binomial tree: every process forwards what its subtree has."""
    below = sum(min(rank & -rank, processes - rank) for rank in range(1, processes))
    share = payload_bytes / processes
    others = processes - 1
    return Cost(_doublings(processes), others * share, 0, others, below * share)


def scatter(processes: int, payload_bytes: float) -> Cost:
    """Binomial tree, the reverse of gather."""
    return gather(processes, payload_bytes)


def all_reduce(
    processes: int, payload_bytes: float, algorithm: Algorithm = "ring", per_host: int = 0
) -> Cost:
    """By any algorithm. `per_host` processes share a host; 0: as many hosts as ranks in a host."""
    if algorithm == "ring":
        return of_all(processes, collective_cost.all_reduce(processes, payload_bytes))
    if algorithm == "tree":
        return reduce(processes, payload_bytes) + broadcast(processes, payload_bytes)
    if algorithm == "mesh":
        return _mesh(processes, payload_bytes)
    if algorithm == "hierarchical":
        inside, between = hierarchical(processes, payload_bytes, per_host or columns(processes))
        return inside + between
    return _folded(processes, payload_bytes, whole=algorithm == "doubling")


def hierarchical(processes: int, payload_bytes: float, per_host: int) -> tuple[Cost, Cost]:
    """The cost inside hosts, by tree, and between their first processes, by ring."""
    hosts = -(-processes // per_host)
    inside = reduce(per_host, payload_bytes) + broadcast(per_host, payload_bytes)
    others = 2 * (processes - hosts)
    return (
        Cost(inside.messages, inside.sent_bytes, inside.reduced_bytes, others, others * payload_bytes),
        all_reduce(hosts, payload_bytes),
    )


def order(link: Link, processes: int, payload_bytes: float) -> list[Algorithm]:
    """All-reduce algorithms, fastest first."""
    return sorted(ALGORITHMS, key=lambda name: all_reduce(processes, payload_bytes, name).seconds(link))


def columns(processes: int) -> int:
    """Width of the squarest mesh of so many processes: the least divisor not below the square root."""
    least = math.isqrt(max(0, processes - 1)) + 1
    return next(width for width in range(least, processes + 1) if processes % width == 0)


def _mesh(processes: int, payload_bytes: float) -> Cost:
    width = columns(processes)
    height = processes // width
    rows = all_reduce(width, payload_bytes)
    return _side_by_side(rows, height) + _side_by_side(all_reduce(height, payload_bytes / width), width)


def _side_by_side(cost: Cost, groups: int) -> Cost:
    """The cost of `groups` of them at the same time, on disjoint processes."""
    return replace(cost, all_messages=groups * cost.all_messages, all_bytes=groups * cost.all_bytes)


def _folded(processes: int, payload_bytes: float, whole: bool) -> Cost:
    """Recursive doubling, which exchanges the whole payload every time, or halving and doubling, which exchange pieces.

    Processes beyond a power of two send theirs to a partner first and receive the sum at the end.
    """
    power = 1 << (processes.bit_length() - 1)
    rest = processes - power
    rounds = _doublings(power)
    if whole:
        core = Cost(
            rounds,
            rounds * payload_bytes,
            rounds * payload_bytes,
            power * rounds,
            power * rounds * payload_bytes,
        )
    else:
        passed = (power - 1) / power * payload_bytes
        core = Cost(2 * rounds, 2 * passed, passed, 2 * power * rounds, 2 * power * passed)
    if not rest:
        return core
    return core + Cost(2, 2 * payload_bytes, payload_bytes, 2 * rest, 2 * rest * payload_bytes)


def _doublings(processes: int) -> int:
    """Number of doublings from 1 to at least `processes`."""
    return (processes - 1).bit_length()
