"""The cost of collectives: seconds by the alpha-beta model (Hockney 1994), bytes and messages sent.

A message of n bytes takes alpha + beta · n seconds, and reducing n received bytes gamma · n. A collective takes as long
as the longest chain of messages in which each waits for the previous one. Formulas are those of the ring (Thakur 2005,
section 4; Patarasuk 2009). The counts of all messages and bytes are exact where the payload divides evenly. No torch
here: planners read it.

`payload_bytes` is what one process has at the end (all-gather, all-reduce) or had at the start (reduce-scatter,
all-to-all, its own piece included): the larger of the two.
"""

from __future__ import annotations

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


def all_reduce(processes: int, payload_bytes: float) -> Cost:
    """Ring."""
    return reduce_scatter(processes, payload_bytes) + all_gather(processes, payload_bytes)
