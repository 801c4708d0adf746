"""Outliers: updates out of all proportion to the others of their round.

An update is one if both hold:

    its step length, norm / steps, is more than `factor` times the median one of the other updates
    its norm is larger than that of all params that are trained

Each alone occurs in honest training: a new site among converged ones takes steps a thousand times as long as theirs, and
a model that starts at zero has no norm. Both together would replace the model. If a task specifies epochs, the number of
steps is the client's own claim, so no client counts for more than `MAX_STEP_RATIO` times the median.

Further streams of a client rule, such as SCAFFOLD's control variates, follow from the delta. A stream is out of proportion
if it is `factor` times as long as the delta implies, and as an addition to the gradient would move the model by more than
its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from strategies.client_rules import ClientRule
from strategies.lazy import l2_norm
from strategies.params import Tensors
from strategies.update import Update

MAX_STEP_RATIO = 10


@dataclass(frozen=True)
class UpdateNorms:
    """Norms of an accepted update. `norm`: L2 norm of the delta; `streams`: L2 norms of the other streams."""

    client: str
    norm: float
    num_steps: int
    streams: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outlier:
    """Why an update is excluded: which stream is too long, its norm, and the limit."""

    client: str
    what: str
    norm: float
    limit: float

    def figures(self) -> dict[str, str | float]:
        """Values of the `update_excluded` event."""
        return {"what": self.what, "norm": self.norm, "limit": self.limit}


@dataclass(frozen=True)
class Bounds:
    """What one round's updates are compared with.

    Attributes:
        factor: 0: nothing is an outlier.
        params_norm: returns the L2 norm of the trained params; called only if it decides.
        broadcast: the client rule's streams as they were sent.
    """

    factor: float
    params_norm: Callable[[], float]
    rule: ClientRule
    lr: float
    broadcast: Mapping[str, Tensors] = field(default_factory=dict)


def measure(client: str, update: Update) -> UpdateNorms:
    streams = {name: l2_norm(tensors) for name, tensors in update.extras.items()}
    return UpdateNorms(client, update.norm, update.num_steps, streams)


def find_outliers(norms: Mapping[int, UpdateNorms], bounds: Bounds) -> dict[int, Outlier]:
    """The outliers of a round's accepted updates by position. A single update is never an outlier."""
    if not bounds.factor or len(norms) < 2:
        return {}
    positions = sorted(norms)
    median_steps = median_low(norms[position].num_steps for position in positions)
    steps = [min(norms[position].num_steps, MAX_STEP_RATIO * median_steps) for position in positions]
    lengths = [norms[position].norm / count for position, count in zip(positions, steps, strict=True)]
    broadcast = {name: l2_norm(tensors) for name, tensors in bounds.broadcast.items()}
    outliers: dict[int, Outlier] = {}
    for position, count, median in zip(positions, steps, medians_of_others(lengths), strict=True):
        each = norms[position]
        outlier = _long_delta(each, bounds, bounds.factor * median * count) or _long_stream(
            each, bounds, broadcast, median_steps
        )
        if outlier is not None:
            outliers[position] = outlier
    return outliers


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the (lower) median of all others. Needs at least two values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 2) // 2
    medians = [0.0] * len(values)
    for rank, index in enumerate(order):
        medians[index] = values[order[middle if rank > middle else middle + 1]]
    return medians


def _long_delta(each: UpdateNorms, bounds: Bounds, limit: float) -> Outlier | None:
    if each.norm <= limit or each.norm <= bounds.params_norm():
        return None
    return Outlier(each.client, "delta", each.norm, max(limit, bounds.params_norm()))


def _long_stream(
    each: UpdateNorms, bounds: Bounds, broadcast: Mapping[str, float], steps: int
) -> Outlier | None:
    for name, norm in each.streams.items():
        implied = bounds.rule.stream_norm(broadcast.get(name, 0.0), each.norm, each.num_steps, bounds.lr)
        limit = bounds.factor * implied
        if norm > limit and norm * bounds.lr * steps > bounds.params_norm():
            return Outlier(each.client, name, norm, max(limit, bounds.params_norm() / (bounds.lr * steps)))
    return None
