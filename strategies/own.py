"""A strategy of one's own: a function of all updates of a cohort, on the base of a known algorithm.

The base gives the client rule, the transforms and the server optimizer; the function replaces its mean. A mean is folded
as updates arrive. A median, or a choice among updates, needs all of them, so the fold keeps them until the round ends:
those on disk stay there, those in memory take a model each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strategies import presets
from strategies.params import Tensors
from strategies.strategy import Fold, Strategy, WeightedMean
from strategies.update import Aggregate, Update

AggregateUpdates = Callable[[Sequence[Update]], Tensors]
"""The delta of a cohort, from its updates (at least one, in canonical order): tensors of their names and shapes."""

REPLACED = "weighting"
"""The option of a base that only its mean has."""


@dataclass(frozen=True)
class OwnAggregator:
    """Aggregates by a function of all updates. Further streams of the client rule are averaged, unweighted."""

    aggregate: AggregateUpdates

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

    def finish(self) -> Aggregate:
        rest = self._rest.finish()
        return replace(rest, delta=self._aggregate([update for _, update in sorted(self._received.items())]))


def compose(name: str, base: str, options: Mapping[str, Any], aggregate: AggregateUpdates) -> Strategy:
    """The algorithm `base` with its options, aggregating by `aggregate`, under a new name.

    Raises:
        OptionError: the base is unknown, or an option is not one of its.
    """
    if REPLACED in options:
        raise presets.OptionError(
            f"{name} has no option {REPLACED!r}: it replaces the mean of its base, {base}", REPLACED
        )
    return replace(presets.get(base, **options), name=name, aggregator=OwnAggregator(aggregate))
