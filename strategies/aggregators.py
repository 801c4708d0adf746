"""Aggregators: how a cohort's updates become one delta.

The weighted mean is folded as updates arrive. The cohort's canonical order is cut into blocks of
`BLOCK` positions; inside a block updates are summed in position order, then blocks are summed in block
order, all in float64. Floating-point addition is not associative, so this fixed tree is what makes the
result the same bits whatever the order of arrival and however many workers summed the blocks.

Updates that lie on disk are noted and not read. Their mean is computed where the server optimizer reads it,
piece by piece in the same tree (`strategies.lazy`), so that a fold of them holds no tensor at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from strategies.lazy import elementwise, summed
from strategies.params import FloatArray, Tensors
from strategies.update import Aggregate, Update

BLOCK = 8
Weighting = Literal["examples", "uniform"]


@dataclass(frozen=True)
class PartialSum:
    """Weighted sum over the accepted updates of one block, float64."""

    delta: Tensors
    extras: Mapping[str, Tensors]
    weight: float
    num_updates: int
    num_examples: int
    loss_sum: float


class Fold(Protocol):
    """An aggregation in progress over `cohort_size` canonical positions."""

    def add(self, position: int, update: Update) -> None:
        """Takes the accepted update of the client at `position`."""

    def skip(self, position: int) -> None:
        """Says that nothing will come from `position`."""

    def finish(self) -> Aggregate:
        """The aggregate; positions not heard of count as skipped. Raises ValueError without any update."""


class Aggregator(Protocol):
    """Makes folds; `memory` says what one holds at its peak."""

    @property
    def memory(self) -> Literal["one model", "cohort"]: ...

    def start(self, cohort_size: int) -> Fold: ...


@dataclass(frozen=True)
class WeightedMean:
    """Mean of updates weighted by example count, or unweighted with `weighting="uniform"`.

    Of updates in memory it holds one float64 model, the updates of incomplete blocks and the sums of blocks ahead
    of their turn: one model, and at most one block, when results come in canonical order. Extra streams are always
    averaged unweighted, as SCAFFOLD's control variates ask (Karimireddy 2020, Algorithm 1, line 17). McMahan 2017,
    Algorithm 1.
    """

    weighting: Weighting = "examples"
    memory: Literal["one model", "cohort"] = "one model"

    def start(self, cohort_size: int) -> MeanFold:
        return MeanFold(self.weighting, cohort_size)


def sum_block(updates: list[Update], weighting: Weighting) -> PartialSum | None:
    """Sum of one block's updates, given in position order; None for an empty block.

    Pure, so that a worker can do it where the updates are and send one partial sum instead of eight.
    """
    if not updates:
        return None
    first, *rest = updates
    total = _weighted(first, weighting)
    for update in rest:
        total = _plus(total, _weighted(update, weighting))
    return total


class MeanFold:
    """The mean, block by block. See the module's story for the order of summation."""

    def __init__(self, weighting: Weighting, cohort_size: int) -> None:
        self._weighting = weighting
        self._size = cohort_size
        self._num_blocks = -(-cohort_size // BLOCK)
        self._heard: dict[int, dict[int, Update | None]] = {}
        self._partials: dict[int, PartialSum | None] = {}
        self._next_block = 0
        self._total: PartialSum | None = None

    def add(self, position: int, update: Update) -> None:
        self._hear(position, update)

    def skip(self, position: int) -> None:
        self._hear(position, None)

    def add_partial(self, block: int, partial: PartialSum | None) -> None:
        """Takes a whole block at once, as `sum_block` summed it elsewhere; None where all of it was skipped.

        Raises:
            ValueError: no such block, or something was already heard from it.
        """
        if not 0 <= block < self._num_blocks:
            raise ValueError(f"block {block} is outside the cohort's {self._num_blocks} blocks")
        if block in self._heard or self._is_closed(block):
            raise ValueError(f"block {block} was already folded, in whole or in part")
        self._settle(block, partial)

    def finish(self) -> Aggregate:
        while self._next_block < self._num_blocks:
            self._close(self._next_block)
        if self._total is None:
            raise ValueError("no update to aggregate: every position of the cohort was skipped")
        return _mean(self._total)

    def _hear(self, position: int, update: Update | None) -> None:
        if not 0 <= position < self._size:
            raise ValueError(f"position {position} is outside the cohort of {self._size}")
        block = position // BLOCK
        heard = self._heard.get(block, {})
        if position in heard or self._is_closed(block):
            raise ValueError(f"position {position} was already folded")
        self._heard[block] = heard | {position: update}
        if len(self._heard[block]) == min(BLOCK, self._size - block * BLOCK):
            self._close(block)

    def _close(self, block: int) -> None:
        heard = self._heard.pop(block, {})
        updates = [update for _, update in sorted(heard.items()) if update is not None]
        self._settle(block, sum_block(updates, self._weighting))

    def _is_closed(self, block: int) -> bool:
        return block < self._next_block or block in self._partials

    def _settle(self, block: int, partial: PartialSum | None) -> None:
        self._partials[block] = partial
        while self._next_block in self._partials:
            following = self._partials.pop(self._next_block)
            self._next_block += 1
            if following is not None:
                self._total = following if self._total is None else _plus(self._total, following)


def _weighted(update: Update, weighting: Weighting) -> PartialSum:
    weight = float(update.num_examples) if weighting == "examples" else 1.0
    return PartialSum(
        delta=elementwise(lambda value: value.astype(np.float64) * weight, update.delta),
        extras={stream: elementwise(_float64, tensors) for stream, tensors in update.extras.items()},
        weight=weight,
        num_updates=1,
        num_examples=update.num_examples,
        loss_sum=update.train_loss * update.num_examples,
    )


def _float64(values: FloatArray) -> FloatArray:
    return values.astype(np.float64)


def _plus(left: PartialSum, right: PartialSum) -> PartialSum:
    return PartialSum(
        delta=summed(left.delta, right.delta),
        extras={stream: summed(tensors, right.extras[stream]) for stream, tensors in left.extras.items()},
        weight=left.weight + right.weight,
        num_updates=left.num_updates + right.num_updates,
        num_examples=left.num_examples + right.num_examples,
        loss_sum=left.loss_sum + right.loss_sum,
    )


def _mean(total: PartialSum) -> Aggregate:
    return Aggregate(
        delta=elementwise(lambda value: value / total.weight, total.delta),
        extras={
            stream: elementwise(lambda value: value / total.num_updates, tensors)
            for stream, tensors in total.extras.items()
        },
        num_updates=total.num_updates,
        num_examples=total.num_examples,
        train_loss=total.loss_sum / total.num_examples,
    )
