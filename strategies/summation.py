"""How updates are summed where they were made, as a value that can be sent there.

Whoever trains several clients of a cohort need not hand over each update: where the aggregator takes partial sums, one sum
of a canonical block (`strategies.strategy.BLOCK` positions) stands for its updates, and the result is the same to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from strategies.params import PIECE, Params, spans
from strategies.strategy import ClipNorm, Strategy, Weighting, clipping
from strategies.summation_tree import Joins, Nodes, PartialSum, plan_joins, weigh
from strategies.update import Update, apply_all

MAX_TRAIN_LOSS = 1e6
"""A client's training loss is clamped to this in the round's mean, so that one client cannot make the mean infinite."""


@dataclass(frozen=True)
class StackedUpdates:
    """Updates in the order of their positions, all finite, without streams beside the delta.

    Attributes:
        deltas: float32 [updates, …] by tensor name.
        examples: their numbers of examples.
        losses: their training losses.
        norms: their L2 norms, as `measure_norms` measures them.
    """

    deltas: Params
    examples: Sequence[int]
    losses: Sequence[float]
    norms: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Summation:
    """What happens to the accepted updates of a block: clipped to `clip_norm` (0: not), then summed by `weighting`."""

    weighting: Weighting
    clip_norm: float = 0.0

    def weigh(self, update: Update) -> PartialSum:
        """The sum of one accepted update."""
        return weigh(apply_all(clipping(self.clip_norm), update, {})[0], self.weighting)

    def sum_stack(
        self,
        positions: Sequence[int],
        updates: StackedUpdates,
        weight_limit: int | None,
        within: tuple[int, int],
    ) -> Nodes:
        """The sums of all accepted updates after `clamp`, given their ascending positions, as the largest nodes of the tree within
        the range [start, stop)."""
        examples = [_clamp_examples(count, weight_limit) for count in updates.examples]
        losses = [_clamp_loss(loss) for loss in updates.losses]
        weights = np.array(examples, np.float64) if self.weighting == "examples" else np.ones(len(examples))
        joins = plan_joins(tuple(positions), *within)
        figures = joins.add(
            np.stack([weights, np.array(losses) * np.array(examples, np.float64)], 1)
        ).tolist()
        rows = _sum_stack(joins, self._clip(updates), weights)
        bounds = [*joins.nodes, len(positions)]
        return [
            (
                positions[first],
                PartialSum(
                    {name: value[at] for name, value in rows.items()},
                    {},
                    weight,
                    last - first,
                    sum(examples[first:last]),
                    loss_sum,
                ),
            )
            for at, ((weight, loss_sum), (first, last)) in enumerate(
                zip(figures, itertools.pairwise(bounds), strict=True)
            )
        ]

    def _clip(self, updates: StackedUpdates) -> Params:
        """The deltas as `ClipNorm` scales them."""
        is_longer = updates.norms > self.clip_norm
        if self.clip_norm <= 0 or not is_longer.any():
            return updates.deltas
        factors = np.ones(len(is_longer), np.float32)
        factors[is_longer] = self.clip_norm / updates.norms[is_longer]
        return {name: value * _column(factors, value.ndim) for name, value in updates.deltas.items()}

    def to_options(self) -> dict[str, Any]:
        """The value as JSON."""
        return {"weighting": self.weighting, "clip_norm": self.clip_norm}

    @staticmethod
    def from_options(options: Mapping[str, Any]) -> Summation:
        """The value of `to_options`."""
        assert options["weighting"] in get_args(Weighting)
        return Summation(options["weighting"], float(options["clip_norm"]))


def of(strategy: Strategy) -> Summation | None:
    """How the strategy's updates are summed; None if its aggregator needs each one, or a transform cannot be sent."""
    weighting = strategy.aggregator.partial_sums
    clips = [each.max_norm for each in strategy.transforms if isinstance(each, ClipNorm)]
    if weighting is None or len(strategy.transforms) > 1 or len(clips) < len(strategy.transforms):
        return None
    return Summation(weighting, *clips)


def clamp(update: Update, weight_limit: int | None) -> Update:
    """The update with its number of examples and its training loss within bounds. `weight_limit`: None: no limit."""
    examples, loss = _clamp_examples(update.num_examples, weight_limit), _clamp_loss(update.train_loss)
    if (examples, loss) == (update.num_examples, update.train_loss):
        return update
    return replace(update, num_examples=examples, train_loss=loss)


def measure_norms(deltas: Params, updates: int) -> npt.NDArray[np.float64]:
    """The L2 norm of each of so many stacked deltas, as `strategies.params.l2_norm` sums it, to the bit."""
    squares = np.zeros(updates)
    scratch = np.empty(PIECE)
    for name in sorted(deltas):
        values = deltas[name].reshape(updates, -1)
        for start, stop in spans(values.shape[1]):
            for rows in _groups(updates, stop - start):
                piece = values[rows, start:stop]
                squared = scratch[: piece.size].reshape(piece.shape)
                squares[rows] += np.square(piece, out=squared, dtype=np.float64).sum(axis=1)
    return np.sqrt(squares)


def _sum_stack(joins: Joins, deltas: Params, weights: npt.NDArray[np.float64]) -> Params:
    """The weighted deltas, summed in the tree, [nodes, …]."""
    rows = {name: value.reshape(len(weights), -1) for name, value in deltas.items()}
    sums = {name: np.empty((len(joins.nodes), value.shape[1])) for name, value in sorted(rows.items())}
    width = max(1, PIECE // len(weights))
    scratch = np.empty((len(weights), min(width, sum(value.shape[1] for value in sums.values()))))
    for columns in _columns({name: value.shape[1] for name, value in sums.items()}, width):
        end = 0
        for name, start, stop in columns:
            begin, end = end, end + stop - start
            target = scratch[:, begin:end]
            np.multiply(rows[name][:, start:stop], weights[:, None], out=target, dtype=np.float64)
        total = joins.add(scratch[:, :end])
        end = 0
        for name, start, stop in columns:
            begin, end = end, end + stop - start
            sums[name][:, start:stop] = total[:, begin:end]
    return {name: value.reshape(-1, *deltas[name].shape[1:]) for name, value in sums.items()}


def _columns(sizes: Mapping[str, int], width: int) -> Iterator[list[tuple[str, int, int]]]:
    """Spans (name, start, stop) of tensors of these sizes, in groups of `width` values or less."""
    group: list[tuple[str, int, int]] = []
    free = width
    for name, size in sizes.items():
        start = 0
        while start < size:
            stop = min(size, start + free)
            group.append((name, start, stop))
            free -= stop - start
            start = stop
            if free == 0:
                yield group
                group, free = [], width
    if group:
        yield group


def _groups(updates: int, size: int) -> Iterator[slice]:
    """Groups of updates of `size` values each, in order, as many as a processor's cache holds, at least one."""
    count = max(1, PIECE // max(1, size))
    return (slice(start, start + count) for start in range(0, updates, count))


def _column(factors: npt.NDArray[np.float32], axes: int) -> npt.NDArray[np.float32]:
    """The factors along the first of so many axes."""
    return factors.reshape(-1, *[1] * (axes - 1))


def _clamp_examples(examples: int, weight_limit: int | None) -> int:
    return examples if weight_limit is None else min(examples, weight_limit)


def _clamp_loss(loss: float) -> float:
    return min(max(loss, -MAX_TRAIN_LOSS), MAX_TRAIN_LOSS)
