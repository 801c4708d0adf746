"""HeteroFL: clients of smaller device classes train the leading part of every tensor; each coordinate is averaged over those who hold it. Diao 2021, Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from strategies import options
from strategies.client_rules import PlainSGD
from strategies.cohort_fold import NeedsEachUpdate, SingleUpdates
from strategies.params import FloatArray, LazyTensors, State, Tensors, shape_of
from strategies.slices import Shapes, corner, each_by, place, require_slices, shapes_of, take
from strategies.strategy import SGD, MeanFold, Strategy, Weighting, clipping
from strategies.summation_tree import PartialSum, SummationTree, plus
from strategies.update import Aggregate, Update

CLASSES = {"full": 1.0, "half": 0.5, "quarter": 0.25}


@dataclass(frozen=True)
class HoldersMean(NeedsEachUpdate):
    """At each coordinate the mean of the updates that hold it. Diao 2021, equations 1 to 3, weighted by example count."""

    weighting: Weighting

    def start(self, cohort_size: int) -> HoldersFold:
        return HoldersFold(self.weighting, cohort_size)


class HoldersFold(SingleUpdates):
    """Sums the updates of each shape apart, in the order of `MeanFold`; so updates of one shape give the bits of its mean.

    Memory: one model of each size. The aggregate has the shapes of the largest updates, of which all others must be leading parts.
    """

    def __init__(self, weighting: Weighting, cohort_size: int) -> None:
        self._weighting = weighting
        self._size = cohort_size
        self._folds: dict[tuple[tuple[str, tuple[int, ...]], ...], MeanFold] = {}
        self._positions: set[int] = set()

    def add(self, position: int, update: Update) -> None:
        if position in self._positions:
            raise ValueError(f"position {position} was already folded")
        self._positions.add(position)
        shapes = tuple(sorted(shapes_of(update.delta).items()))
        fold = self._folds.setdefault(shapes, MeanFold(self._weighting, self._size))
        fold.add(position, replace(update, extras={}))

    def finish(self) -> Aggregate:
        folds = sorted(self._folds.items(), key=lambda each: -_count(dict(each[0])))
        if len(folds) == 1:
            return folds[0][1].finish()
        if not folds:
            raise ValueError("no update to aggregate: every position of the cohort was skipped")
        for shapes, _ in folds[1:]:
            require_slices(dict(shapes), dict(folds[0][0]))
        return _merge([_total(fold) for _, fold in folds])


def _total(fold: MeanFold) -> PartialSum:
    """The weighted sum of the updates of one shape."""
    tree = SummationTree(plus)
    for position, partial in fold.nodes():
        tree.add(position, partial)
    total = tree.total()
    assert total is not None  # there is a fold for each shape that came
    return total


def _merge(totals: Sequence[PartialSum]) -> Aggregate:
    """The mean of sums of different shapes, the largest first."""
    largest = shapes_of(totals[0].delta)

    def mean(name: str) -> FloatArray:
        first, *others = totals
        total = np.array(first.delta[name], np.float64)
        weight = np.full(largest[name], first.weight)
        for each in others:
            held = corner(shape_of(each.delta, name))
            total[held] += each.delta[name]
            weight[held] += each.weight
        result: FloatArray = total / weight
        return result

    examples = sum(each.num_examples for each in totals)
    return Aggregate(
        delta=each_by(mean, largest, is_lazy=any(isinstance(each.delta, LazyTensors) for each in totals)),
        extras={},
        num_updates=sum(each.num_updates for each in totals),
        num_examples=examples,
        train_loss=sum(each.loss_sum for each in totals) / examples,
    )


def _count(shapes: Shapes) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())


@dataclass(frozen=True)
class HeldSGD:
    """x ← x + server_lr · Δ at the coordinates that Δ has. Nobody of the round holds the others: they stay as they are."""

    server_lr: float

    def init(self, trainable: Tensors) -> State:
        return State()

    def step(self, params: Tensors, delta: Tensors, state: State, share: float) -> tuple[Tensors, State]:
        held = take(params, shapes_of(delta))
        moved, state = SGD(self.server_lr).step(held, delta, state, share)
        return place(params, moved), state


@dataclass(frozen=True)
class HeteroFL:
    """Which clients have which class, and what a class trains, `coordinator.experiments.device_classes` says."""

    runtimes: ClassVar[tuple[str, ...]] = ("litert", "torch")

    classes: Mapping[str, float] = options.table(
        CLASSES, "width of the model of each device class, one of them 1", low=0.0, low_open=True, high=1.0
    )
    shares: Mapping[str, float] = options.table(
        {},
        "shares of the classes among the clients of a simulation; default: equal",
        low=0.0,
        low_open=True,
    )
    memory_mib: Mapping[str, float] = options.table(
        {}, "memory from which a client has a class, instead of shares; the widest class counts", low=0.0
    )
    server_lr: float = options.server_lr()
    weighting: Weighting = options.weighting()
    clip_norm: float = options.clip_norm()

    def build(self) -> Strategy:
        mean, optimizer = HoldersMean(self.weighting), HeldSGD(self.server_lr)
        clips = clipping(self.clip_norm)
        return Strategy("heterofl", PlainSGD(), clips, mean, optimizer, modes=("sync",))
