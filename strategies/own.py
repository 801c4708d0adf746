"""A strategy of one's own: a function of all updates of a cohort, on the base of a known algorithm.

The base gives the client rule, the transforms and the server optimizer; the function replaces its mean. A mean is folded
as updates arrive. A median, or a choice among updates, needs all of them, so the fold keeps them until the round ends:
those on disk stay there, those in memory take a model each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strategies.params import Tensors
from strategies.strategy import Fold, PartialSum, Strategy, WeightedMean
from strategies.update import Aggregate, Update

AggregateUpdates = Callable[[Sequence[Update]], Tensors]
"""The delta of a cohort, from its updates (at least one, in canonical order): tensors of their names and shapes."""

GROUP = "fedloop.strategies"
"""The entry points of packages that offer a strategy by a short name."""

REPLACED = "weighting"
"""The option of a base that only its mean has."""


@dataclass(frozen=True)
class OwnAggregator:
    """Aggregates by a function of all updates. Further streams of the client rule are averaged, unweighted."""

    aggregate: AggregateUpdates

    @property
    def partial_sums(self) -> None:
        return None

    def start(self, cohort_size: int) -> OwnFold:
        return OwnFold(self.aggregate, WeightedMean("uniform").start(cohort_size))


class OwnFold:
    """Keeps the updates of a cohort until all have arrived. `rest`: folds everything of them but the deltas."""

    def __init__(self, aggregate: AggregateUpdates, rest: Fold) -> None:
        self._aggregate = aggregate
        self._rest = rest
        self._received: dict[int, Update] = {}

    def add(self, position: int, update: Update) -> None:
        self._rest.add(position, replace(update, delta={}))
        self._received[position] = update

    def add_partial(self, block: int, partial: PartialSum) -> None:
        raise TypeError("a strategy of one's own aggregates single updates, not sums of them")

    def finish(self) -> Aggregate:
        rest = self._rest.finish()
        return replace(rest, delta=self._aggregate([update for _, update in sorted(self._received.items())]))


def compose(name: str, base: Strategy, aggregate: AggregateUpdates) -> Strategy:
    """The algorithm `base`, aggregating by `aggregate`, under a new name."""
    return replace(base, name=name, aggregator=OwnAggregator(aggregate))
