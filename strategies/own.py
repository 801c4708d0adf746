"""A strategy of one's own: a function of all updates of a cohort, on the base of a known algorithm.

The base gives the client rule, the transforms and the server optimizer; the function replaces its mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace

from strategies.cohort_fold import AggregateUpdates, CohortFold, NeedsEachUpdate, SingleUpdates
from strategies.params import State, Tensors
from strategies.strategy import Fold, Strategy, WeightedMean
from strategies.update import Aggregate, Update

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


_FLOWER = re.compile(r"flower:((?:[^\W\d]\w*\.)*[^\W\d]\w*)\.([^\W\d]\w*)")
"""A strategy class of Flower: `flower:package.module.Class`."""
_SHIPPED = "flwr.serverapp.strategy"


def is_flower(name: str) -> bool:
    """Whether a strategy's name is that of a class for Flower."""
    return _FLOWER.fullmatch(name) is not None


def split_flower(name: str) -> tuple[str, str]:
    """The module and the class of a name that `is_flower`."""
    found = _FLOWER.fullmatch(name)
    assert found is not None
    return found[1], found[2]


def is_shipped_by_flower(name: str) -> bool:
    """Whether Flower itself has this class, so that it is an installed strategy and no code of a user's own."""
    return is_flower(name) and split_flower(name)[0] == _SHIPPED


@dataclass(frozen=True)
class CohortAggregate(Aggregate):
    """The updates of a cohort as they are; its delta is empty."""

    updates: Sequence[Update] = ()


@dataclass(frozen=True)
class KeepUpdates(NeedsEachUpdate):
    """Keeps the updates for a `WholeStep`."""

    def start(self, cohort_size: int) -> KeepingFold:
        return KeepingFold(WeightedMean().start(cohort_size))


class KeepingFold(SingleUpdates):
    """`rest`: folds everything of the updates but the deltas."""

    def __init__(self, rest: Fold) -> None:
        self._rest = rest
        self._received: dict[int, Update] = {}

    def add(self, position: int, update: Update) -> None:
        self._rest.add(position, replace(update, delta={}))
        self._received[position] = update

    def finish(self) -> CohortAggregate:
        rest = self._rest.finish()
        known = {each.name: getattr(rest, each.name) for each in fields(rest)}
        return CohortAggregate(**known, updates=[update for _, update in sorted(self._received.items())])


Step = Callable[[Tensors, State, Sequence[Update]], tuple[Tensors, State]]
"""Params, the state and all updates of a round -> the next params and state."""


@dataclass(frozen=True)
class WholeStep(Strategy):
    """A strategy that makes the next params of all updates by one function, with a state of its own."""

    step: Step | None = None

    def init(self, params: Tensors, trainable: Collection[str]) -> State:
        return State()

    def apply(
        self, params: Tensors, state: State, aggregate: Aggregate, num_clients: int
    ) -> tuple[Tensors, State]:
        assert self.step is not None and isinstance(aggregate, CohortAggregate)
        return self.step(params, state, aggregate.updates)


def compose(name: str, base: Strategy, aggregate: AggregateUpdates) -> Strategy:
    """The algorithm `base`, aggregating by `aggregate`, under a new name."""
    return replace(base, name=name, aggregator=OwnAggregator(aggregate))
