"""The cost of collectives: seconds by the alpha-beta model (Hockney 1994), bytes and messages sent.

A message of n bytes takes alpha + beta · n seconds, and reducing n received bytes gamma · n. A collective takes as long
as the longest chain of messages in which each waits for the previous one. Formulas are those of Thakur 2005, table 1
and section 4, and for the ring of Patarasuk 2009. The counts of all messages and bytes are exact where the payload
divides evenly, and are what `channel.Traffic` measures. No torch here: planners read it.

`payload_bytes` is what one process has at the end (broadcast, gather, all-gather, all-reduce) or had at the start
(reduce, scatter, reduce-scatter, all-to-all): the larger of the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Algorithm = Literal["ring", "tree", "mesh", "doubling", "halving", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class Link:
    """A connection between processes: `alpha` seconds a message, `beta` seconds a byte, `gamma` seconds a byte reduced."""

    alpha: float
    beta: float
    gamma: float = 0.0


@dataclass(frozen=True)
class Cost:
    """The cost of one collective.

    Attributes:
        messages, sent_bytes, reduced_bytes: along the longest chain.
        all_messages, all_bytes: sent by all processes together.
    """

    messages: float
    sent_bytes: float
    reduced_bytes: float
    all_messages: float
    all_bytes: float

    def seconds(self, link: Link) -> float:
        return link.alpha * self.messages + link.beta * self.sent_bytes + link.gamma * self.reduced_bytes

    def __add__(self, other: Cost) -> Cost:
        """The cost of one after the other."""
        return Cost(
            self.messages + other.messages,
            self.sent_bytes + other.sent_bytes,
            self.reduced_bytes + other.reduced_bytes,
            self.all_messages + other.all_messages,
            self.all_bytes + other.all_bytes,
        )

    def side_by_side(self, groups: int) -> Cost:
        """The cost of `groups` of them at the same time, on disjoint processes."""
        return Cost(
            self.messages,
            self.sent_bytes,
            self.reduced_bytes,
            groups * self.all_messages,
            groups * self.all_bytes,
        )


@dataclass(frozen=True)
class Sample:
    """A measurement: a chain of `messages` that carried `sent_bytes` took `seconds`, more than 0."""

    sent_bytes: float
    seconds: float
    messages: float = 1.0


def fit(samples: Iterable[Sample]) -> Link:
    """The link whose alpha and beta, neither negative, have the least squared relative error over `samples`.

    Relative, because a microsecond matters for a short message and not for a long one. Samples of collectives are
    `Sample(cost.sent_bytes, seconds, cost.messages)`; the time of reductions then counts as part of beta.

    Raises:
        ValueError: fewer than two samples, or all of one length.
    """
    rows = [(sample.messages / sample.seconds, sample.sent_bytes / sample.seconds) for sample in samples]
    mm, mb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = mm * bb - mb * mb
    if len(rows) < 2 or determinant <= 1e-12 * mm * bb:
        raise ValueError("alpha and beta need samples of at least two lengths")
    alpha, beta = (m * bb - b * mb) / determinant, (b * mm - m * mb) / determinant
    if alpha < 0:
        return Link(0.0, b / bb)
    return Link(m / mm, 0.0) if beta < 0 else Link(alpha, beta)


def send(payload_bytes: float) -> Cost:
    return Cost(1, payload_bytes, 0, 1, payload_bytes)


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


def all_gather(processes: int, payload_bytes: float) -> Cost:
    """Ring."""
    others = processes - 1
    return Cost(others, others / processes * payload_bytes, 0, others * processes, others * payload_bytes)


def reduce_scatter(processes: int, payload_bytes: float) -> Cost:
    """Ring."""
    others = processes - 1
    passed = others / processes * payload_bytes
    return Cost(others, passed, passed, others * processes, others * payload_bytes)


def all_to_all(processes: int, payload_bytes: float) -> Cost:
    """Every pair exchanges its pieces, one pair a process at a time."""
    return all_gather(processes, payload_bytes)


def all_reduce(
    processes: int, payload_bytes: float, algorithm: Algorithm = "ring", per_host: int = 0
) -> Cost:
    """By any algorithm. `per_host` processes share a host; 0: as many hosts as ranks in a host."""
    if algorithm == "ring":
        return reduce_scatter(processes, payload_bytes) + all_gather(processes, payload_bytes)
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


def send_seconds(link: Link, payload_bytes: float) -> float:
    return send(payload_bytes).seconds(link)


def all_gather_seconds(link: Link, processes: int, payload_bytes: float) -> float:
    """With a ring; `payload_bytes` is the gathered whole."""
    return all_gather(processes, payload_bytes).seconds(link)


def reduce_scatter_seconds(link: Link, processes: int, payload_bytes: float) -> float:
    """With a ring; `payload_bytes` is the whole before it is scattered."""
    return reduce_scatter(processes, payload_bytes).seconds(link)


def all_to_all_seconds(link: Link, processes: int, payload_bytes: float) -> float:
    """`payload_bytes` is everything one process sends, its own piece included."""
    return all_to_all(processes, payload_bytes).seconds(link)


def all_reduce_seconds(
    link: Link,
    processes: int,
    payload_bytes: float,
    algorithm: Algorithm = "ring",
    per_host: int = 0,
) -> float:
    return all_reduce(processes, payload_bytes, algorithm, per_host).seconds(link)


def order(link: Link, processes: int, payload_bytes: float) -> list[Algorithm]:
    """All-reduce algorithms, fastest first."""
    return sorted(ALGORITHMS, key=lambda name: all_reduce_seconds(link, processes, payload_bytes, name))


def columns(processes: int) -> int:
    """Width of the squarest mesh of so many processes: the least divisor not below the square root."""
    least = math.isqrt(max(0, processes - 1)) + 1
    return next(width for width in range(least, processes + 1) if processes % width == 0)


def _mesh(processes: int, payload_bytes: float) -> Cost:
    width = columns(processes)
    height = processes // width
    rows = reduce_scatter(width, payload_bytes) + all_gather(width, payload_bytes)
    return rows.side_by_side(height) + all_reduce(height, payload_bytes / width).side_by_side(width)


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
