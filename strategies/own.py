"""A strategy of one's own: a function of all updates of a cohort, on the base of a known algorithm.

The base gives the client rule, the transforms and the server optimizer; the function replaces its mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strategies.cohort_fold import AggregateUpdates, CohortFold, NeedsEachUpdate
from strategies.strategy import Strategy, WeightedMean

GROUP = "fedloop.strategies"
"""The entry points of packages that offer a strategy by a short name."""

REPLACED = "weighting"
"""The option of a base that only its mean has."""


@dataclass(frozen=True)
class OwnAggregator(NeedsEachUpdate):
    """Aggregates by a function of all updates. Further streams of the client rule are averaged, unweighted."""

    aggregate: AggregateUpdates

    def start(self, cohort_size: int) -> CohortFold:
        return CohortFold(self.aggregate, WeightedMean("uniform").start(cohort_size))


def compose(name: str, base: Strategy, aggregate: AggregateUpdates) -> Strategy:
    """The algorithm `base`, aggregating by `aggregate`, under a new name."""
    return replace(base, name=name, aggregator=OwnAggregator(aggregate))
