"""Aggregators: how a cohort's updates become one delta.

The weighted mean folds updates as they arrive. The cohort's canonical order is cut into blocks of
`BLOCK` positions; updates are summed in position order inside a block, then blocks in block order, all in
float64. Floating-point addition is not associative, so this fixed tree gives the same bits whatever the order
of arrival.

Updates on disk are recorded, not read. Their mean is computed where the server optimizer reads it, piece by
piece in the same tree (`strategies.lazy`), so folding them keeps no tensor in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from strategies.lazy import add, elementwise
from strategies.params import FloatArray, Tensors
from strategies.update import Aggregate, Update

BLOCK = 8
Weighting = Literal["examples", "uniform"]


class Fold(Protocol):
    """An aggregation in progress over `cohort_size` canonical positions."""

    def add(self, position: int, update: Update) -> None:
        """Adds the accepted update of the client at `position`."""

    def finish(self) -> Aggregate:
        """The aggregate; positions without an update are skipped. Raises ValueError without any update."""


class Aggregator(Protocol):
    """Starts folds."""

    def start(self, cohort_size: int) -> Fold: ...


@dataclass(frozen=True)
class WeightedMean:
    """Mean of updates weighted by example count, or unweighted with `weighting="uniform"`.

    Of updates in memory it holds one float64 model, the updates of incomplete blocks and the sums of blocks ahead
    of their turn: one model, and at most one block, when results arrive in canonical order. Extra streams are always
    averaged unweighted, as SCAFFOLD's control variates require (Karimireddy 2020, Algorithm 1, line 17). McMahan
    2017, Algorithm 1.
    """

    weighting: Weighting = "examples"

    def start(self, cohort_size: int) -> MeanFold:
        return MeanFold(self.weighting, cohort_size)


@dataclass(frozen=True)
class _Sum:
    """Weighted sum of updates, float64."""

    delta: Tensors
    extras: Mapping[str, Tensors]
    weight: float
    num_updates: int
    num_examples: int
    loss_sum: float


class MeanFold:
    """The mean, block by block. The module's docstring describes the order of summation."""

    def __init__(self, weighting: Weighting, cohort_size: int) -> None:
        self._weighting = weighting
        self._size = cohort_size
        self._num_blocks = -(-cohort_size // BLOCK)
        self._received: dict[int, dict[int, Update]] = {}
        self._block_sums: dict[int, _Sum | None] = {}
        self._next_block = 0
        self._total: _Sum | None = None

    def add(self, position: int, update: Update) -> None:
        if not 0 <= position < self._size:
            raise ValueError(f"position {position} is outside the cohort of {self._size}")
        block = position // BLOCK
        received = self._received.get(block, {})
        if position in received or block < self._next_block or block in self._block_sums:
            raise ValueError(f"position {position} was already folded")
        self._received[block] = received | {position: update}
        if len(self._received[block]) == min(BLOCK, self._size - block * BLOCK):
            self._close(block)

    def finish(self) -> Aggregate:
        while self._next_block < self._num_blocks:
            self._close(self._next_block)
        if self._total is None:
            raise ValueError("no update to aggregate: every position of the cohort was skipped")
        return _mean(self._total)

    def _close(self, block: int) -> None:
        """Sums the block, then adds to the total every block whose turn has come."""
        received = self._received.pop(block, {})
        self._block_sums[block] = _sum([update for _, update in sorted(received.items())], self._weighting)
        while self._next_block in self._block_sums:
            following = self._block_sums.pop(self._next_block)
            self._next_block += 1
            if following is not None:
                self._total = following if self._total is None else _plus(self._total, following)


def _sum(updates: list[Update], weighting: Weighting) -> _Sum | None:
    """Sum of one block's updates, in position order; None for an empty block."""
    if not updates:
        return None
    first, *rest = updates
    total = _weighted(first, weighting)
    for update in rest:
        total = _plus(total, _weighted(update, weighting))
    return total


def _weighted(update: Update, weighting: Weighting) -> _Sum:
    weight = float(update.num_examples) if weighting == "examples" else 1.0
    return _Sum(
        delta=elementwise(lambda value: value.astype(np.float64) * weight, update.delta),
        extras={stream: elementwise(_float64, tensors) for stream, tensors in update.extras.items()},
        weight=weight,
        num_updates=1,
        num_examples=update.num_examples,
        loss_sum=update.train_loss * update.num_examples,
    )


def _float64(values: FloatArray) -> FloatArray:
    return values.astype(np.float64)


def _plus(left: _Sum, right: _Sum) -> _Sum:
    return _Sum(
        delta=add(left.delta, right.delta),
        extras={stream: add(tensors, right.extras[stream]) for stream, tensors in left.extras.items()},
        weight=left.weight + right.weight,
        num_updates=left.num_updates + right.num_updates,
        num_examples=left.num_examples + right.num_examples,
        loss_sum=left.loss_sum + right.loss_sum,
    )


def _mean(total: _Sum) -> Aggregate:
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
