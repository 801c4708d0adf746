"""Outliers: updates out of all proportion to the others of their round.

An update is one if both hold:

    its step length, norm / steps, is more than `factor` times the median one of the other updates
    its norm is larger than that of all params that are trained

Either alone happens in honest training: a new site among converged ones takes steps that are a thousand times theirs,
and a model that starts at zero has no norm. Both together would replace the model by something else. Steps are the
client's own word where the task asks for epochs, so no client counts for more than `MOST_STEPS` times the median.

What a client rule sends besides, such as SCAFFOLD's control variates, follows from the delta; it is out of proportion if
it is `factor` times as long as follows, and as an addition to the gradient would move the model by more than its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from strategies.client_rules import ClientRule
from strategies.lazy import l2_norm
from strategies.params import Tensors
from strategies.update import Update

MOST_STEPS = 10


@dataclass(frozen=True)
class Measured:
    """How long an accepted update is. `streams`: L2 norms of what came besides the delta."""

    client: str
    norm: float
    num_steps: int
    streams: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outlier:
    """Why an update is left out: what is too long, how long it is, and what was the most it might have been."""

    client: str
    what: str
    norm: float
    limit: float

    def figures(self) -> dict[str, str | float]:
        """For the event that tells of it."""
        return {"what": self.what, "norm": self.norm, "limit": self.limit}


@dataclass(frozen=True)
class Limits:
    """What one round's updates are held against.

    Attributes:
        factor: 0: nothing is an outlier.
        params_norm: L2 norm of the trained params; asked for only where it decides.
        broadcast: the client rule's streams as they were sent.
    """

    factor: float
    params_norm: Callable[[], float]
    rule: ClientRule
    lr: float
    broadcast: Mapping[str, Tensors] = field(default_factory=dict)


def measured(client: str, update: Update) -> Measured:
    streams = {name: l2_norm(tensors) for name, tensors in update.extras.items()}
    return Measured(client, update.norm, update.num_steps, streams)


def outliers(found: Mapping[int, Measured], limits: Limits) -> dict[int, Outlier]:
    """The outliers of a round's accepted updates, by position. Of a single update there is nothing to be told."""
    if not limits.factor or len(found) < 2:
        return {}
    positions = sorted(found)
    median_steps = median_low(found[position].num_steps for position in positions)
    steps = [min(found[position].num_steps, MOST_STEPS * median_steps) for position in positions]
    lengths = [found[position].norm / count for position, count in zip(positions, steps, strict=True)]
    broadcast = {name: l2_norm(tensors) for name, tensors in limits.broadcast.items()}
    judged: dict[int, Outlier] = {}
    for position, count, median in zip(positions, steps, medians_of_others(lengths), strict=True):
        each = found[position]
        outlier = _long_delta(each, limits, limits.factor * median * count) or _long_stream(
            each, limits, broadcast, median_steps
        )
        if outlier is not None:
            judged[position] = outlier
    return judged


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the median of all others, of two the lower. At least two values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 2) // 2
    medians = [0.0] * len(values)
    for rank, index in enumerate(order):
        medians[index] = values[order[middle if rank > middle else middle + 1]]
    return medians


def _long_delta(each: Measured, limits: Limits, limit: float) -> Outlier | None:
    if each.norm <= limit or each.norm <= limits.params_norm():
        return None
    return Outlier(each.client, "delta", each.norm, max(limit, limits.params_norm()))


def _long_stream(
    each: Measured, limits: Limits, broadcast: Mapping[str, float], steps: int
) -> Outlier | None:
    for name, norm in each.streams.items():
        follows = limits.rule.stream_norm(broadcast.get(name, 0.0), each.norm, each.num_steps, limits.lr)
        limit = limits.factor * follows
        if norm > limit and norm * limits.lr * steps > limits.params_norm():
            return Outlier(each.client, name, norm, max(limit, limits.params_norm() / (limits.lr * steps)))
    return None
