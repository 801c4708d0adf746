"""The cost of collectives: seconds by the alpha-beta model (Hockney 1994), bytes and messages sent.

A message of n bytes takes alpha + beta · n seconds, and reducing n received bytes gamma · n. A collective takes as long
as the longest chain of messages in which each waits for the previous one. Formulas are those of the ring (Thakur 2005,
section 4; Patarasuk 2009). No torch here: planners read it.

`payload_bytes` is what one process has at the end (all-gather, all-reduce) or had at the start (reduce-scatter,
all-to-all, its own piece included): the larger of the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A connection between processes: `alpha` seconds a message, `beta` seconds a byte, `gamma` seconds a byte reduced."""

    alpha: float
    beta: float
    gamma: float = 0.0


@dataclass(frozen=True)
class Cost:
    """The cost of one collective: what is sent and reduced along the longest chain of messages."""

    messages: float
    sent_bytes: float
    reduced_bytes: float

    def seconds(self, link: Link) -> float:
        return link.alpha * self.messages + link.beta * self.sent_bytes + link.gamma * self.reduced_bytes

    def __add__(self, other: Cost) -> Cost:
        """The cost of one after the other."""
        return Cost(
            self.messages + other.messages,
            self.sent_bytes + other.sent_bytes,
            self.reduced_bytes + other.reduced_bytes,
        )


def exposed(buckets: Iterable[tuple[float, float, int, float]]) -> float:
    """Seconds of an exchange that are left when the computation beside it ends.

    Buckets are exchanged one after the other, in order, each as soon as it is complete.

    Args:
        buckets: runs of equal buckets that become complete at equal intervals: (seconds before the end of the computation
            at which the first of them is complete, and the last, their number, seconds to exchange one).
    """
    over = -math.inf  # the computation ends at 0
    for first, last, count, seconds in buckets:
        # the link is busy from some bucket on: from an earlier run's, this one's first, or its last
        over = max(max(over, -first) + count * seconds, seconds - last)
    return max(0.0, over)


def fit(samples: Iterable[tuple[float, float, float]]) -> Link:
    """The link that explains `samples`: chains of (bytes sent, seconds above 0, messages).

    Its alpha and beta, neither negative, have the least squared relative error. Relative, because a microsecond matters
    for a short message and not for a long one. Where collectives are measured, the time of reductions counts as part of
    beta.

    Raises:
        ValueError: fewer than two samples, or all of one length.
    """
    rows = [(messages / seconds, sent_bytes / seconds) for sent_bytes, seconds, messages in samples]
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
    return Cost(1, payload_bytes, 0)


def all_gather(processes: int, payload_bytes: float) -> Cost:
    """Ring; an all-to-all, where every pair exchanges its pieces, one pair a process at a time, costs the same."""
    others = processes - 1
    return Cost(others, others / processes * payload_bytes, 0)


all_to_all = all_gather


def reduce_scatter(processes: int, payload_bytes: float) -> Cost:
    """Ring."""
    passed = (processes - 1) / processes * payload_bytes
    return Cost(processes - 1, passed, passed)


def all_reduce(processes: int, payload_bytes: float) -> Cost:
    """Ring."""
    return reduce_scatter(processes, payload_bytes) + all_gather(processes, payload_bytes)
