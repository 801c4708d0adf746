"""The cohort fold keeps the updates of a cohort until all have arrived: what needs all of them is computed at the end.

Updates on disk stay there; those in memory take a model each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from strategies.params import Tensors
from strategies.update import Aggregate, Update

if TYPE_CHECKING:
    from strategies.strategy import Fold
    from strategies.summation_tree import PartialSum

AggregateUpdates = Callable[[Sequence[Update]], Tensors]
"""The delta of a cohort, from its updates (at least one, in canonical order): tensors of their names and shapes."""


class TooFewUpdates(ValueError):
    """A fold cannot finish: those that answered do not suffice; the message says what is missing."""


class NeedsEachUpdate:
    """What aggregators have in common that take no sums of blocks."""

    @property
    def partial_sums(self) -> None:
        return None

    @property
    def fewest_updates(self) -> int:
        return 1


class SingleUpdates:
    """What their folds have in common."""

    def add_partial(self, block: int, partial: PartialSum, last_block: int | None = None) -> None:
        raise TypeError("this aggregator needs single updates, not sums of them")


class CohortFold(SingleUpdates):
    """Folds by a function of all updates. `rest`: folds everything of them but the deltas."""

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
