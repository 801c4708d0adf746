"""The tree in which values of a cohort's positions are summed, so that whoever sums a part of it gives the same bits.

Floating-point addition is not associative: the result depends on what is added to what. Here that follows from the positions alone.
The tree is binary and balanced over 0, 1, 2, …: its node of level l and index i holds the positions [i · 2^l, (i + 1) · 2^l) and is the sum of
its two halves; a half without a value is left out. So any range of positions consists of whole nodes, at most two of each level, and
these stand for its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from strategies.params import FloatArray, Tensors, add, elementwise

if TYPE_CHECKING:
    from strategies.strategy import Weighting
    from strategies.update import Update

Value = TypeVar("Value")


class SummationTree(Generic[Value]):
    """A sum in progress over positions from `start` on, which are added in ascending order; it holds a node of each level."""

    def __init__(self, plus: Callable[[Value, Value], Value], start: int = 0) -> None:
        self._plus = plus
        self._start = start
        self._nodes: list[tuple[int, Value]] = []

    def add(self, position: int, value: Value) -> None:
        """Adds the value of a position, or of a whole node, given any position in it."""
        if self._nodes:
            last, _ = self._nodes[-1]
            assert position > last
            self._join(_level(last, position) - 1, position)
        self._nodes.append((position, value))

    def nodes(self, stop: int) -> list[tuple[int, Value]]:
        """The sums of the largest nodes within [start, stop), in order, each with a position in it. Nothing is added after this."""
        self._join(stop.bit_length(), stop)
        return self._nodes

    def total(self) -> Value | None:
        """The sum of all positions of a tree that starts at 0; None if it is empty. Nothing is added after this."""
        while len(self._nodes) > 1:
            self._join_last()
        return self._nodes[0][1] if self._nodes else None

    def _join(self, most: int, stop: int) -> None:
        """Joins the last nodes as long as their common node has the level `most` or less, and lies within [start, stop)."""
        while len(self._nodes) > 1:
            position = self._nodes[-1][0]
            level = _level(self._nodes[-2][0], position)
            first = position >> level << level
            if level > most or first < self._start or first + (1 << level) > stop:
                return
            self._join_last()

    def _join_last(self) -> None:
        _, last = self._nodes.pop()
        position, before = self._nodes.pop()
        self._nodes.append((position, self._plus(before, last)))


@dataclass(frozen=True)
class PartialSum:
    """Weighted sum of some updates, float64."""

    delta: Tensors
    extras: Mapping[str, Tensors]
    weight: float
    num_updates: int
    num_examples: int
    loss_sum: float


Nodes = Sequence[tuple[int, PartialSum]]
"""Sums of nodes of the tree in order, each with a position in it."""


def weigh(update: Update, weighting: Weighting) -> PartialSum:
    """The sum of one update."""
    weight = float(update.num_examples) if weighting == "examples" else 1.0
    return PartialSum(
        delta=elementwise(lambda value: np.multiply(value, weight, dtype=np.float64), update.delta),
        extras={stream: elementwise(_float64, tensors) for stream, tensors in update.extras.items()},
        weight=weight,
        num_updates=1,
        num_examples=update.num_examples,
        loss_sum=update.train_loss * update.num_examples,
    )


def _float64(values: FloatArray) -> FloatArray:
    return values.astype(np.float64)


def plus(left: PartialSum, right: PartialSum) -> PartialSum:
    """The sum of both."""
    return PartialSum(
        delta=add(left.delta, right.delta),
        extras={stream: add(tensors, right.extras[stream]) for stream, tensors in left.extras.items()},
        weight=left.weight + right.weight,
        num_updates=left.num_updates + right.num_updates,
        num_examples=left.num_examples + right.num_examples,
        loss_sum=left.loss_sum + right.loss_sum,
    )


Index = slice | list[int]


@dataclass(frozen=True)
class Joins:
    """How the rows of an array are summed in the tree, all of a level at once.

    Attributes:
        steps: of each level, the rows that are added to, and those that are added to them.
        nodes: the rows that hold the sums at the end, in order.
    """

    steps: tuple[tuple[Index, Index], ...]
    nodes: tuple[int, ...]

    def add(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sums, [nodes, …], given the rows of the positions; overwrites them."""
        for target, source in self.steps:
            rows[target] += rows[source]
        sums: npt.NDArray[np.float64] = rows[list(self.nodes)]
        return sums


@lru_cache(maxsize=64)
def plan_joins(positions: tuple[int, ...], start: int, stop: int) -> Joins:
    """How values of these ascending positions are joined to the largest nodes within [start, stop), as `SummationTree.nodes` does."""
    nodes = list(enumerate(positions))
    steps: list[tuple[Index, Index]] = []
    for level in range(1, stop.bit_length() + 1):
        kept: list[tuple[int, int]] = []
        targets: list[int] = []
        sources: list[int] = []
        for row, position in nodes:
            first = position >> level << level
            joins = kept and kept[-1][1] >> level == position >> level
            if joins and first >= start and first + (1 << level) <= stop:
                targets.append(kept[-1][0])
                sources.append(row)
            else:
                kept.append((row, position))
        if targets:
            steps.append((_as_slice(targets), _as_slice(sources)))
        nodes = kept
    return Joins(tuple(steps), tuple(row for row, _ in nodes))


def _as_slice(rows: list[int]) -> Index:
    """The rows as a slice, which is no copy, where they are equally far apart."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    equal = range(rows[0], rows[0] + step * len(rows), step)
    return slice(equal.start, equal[-1] + 1, step) if rows == list(equal) else rows


def _level(left: int, right: int) -> int:
    """The level of the smallest node that holds both positions."""
    return (left ^ right).bit_length()
