"""The tree in which values of a cohort's positions are summed, so that whoever sums a part of it gives the same bits.

Floating-point addition is not associative: the result depends on what is added to what. Here that follows from the positions alone.
The tree is binary and balanced over 0, 1, 2, …: its node of level l and index i holds the positions [i · 2^l, (i + 1) · 2^l) and is the sum of
its two halves; a half without a value is left out. So any range of positions consists of whole nodes, at most two of each level, and
these stand for its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


def sum_rows(terms: npt.NDArray[np.float64], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """The sum of the rows of `terms` in the tree, given their ascending positions; overwrites them."""
    nodes = list(zip(positions, terms, strict=True))
    while len(nodes) > 1:
        joined: list[tuple[int, npt.NDArray[np.float64]]] = []
        for position, row in nodes:
            if joined and joined[-1][0] == position >> 1:
                target = joined[-1][1]
                target += row
            else:
                joined.append((position >> 1, row))
        nodes = joined
    total: npt.NDArray[np.float64] = nodes[0][1]
    return total


def _level(left: int, right: int) -> int:
    """The level of the smallest node that holds both positions."""
    return (left ^ right).bit_length()
