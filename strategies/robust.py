"""Robust aggregation: one delta of a cohort, some of whose updates may be malicious.

Updates are read in blocks, never as a matrix of all of them. What a rule needs of their geometry are inner products,
which one pass over the updates adds up. From these follow distances, the choice among updates, the means of nearest
neighbours, and the weights of a geometric median. A second pass combines the values of each coordinate, and of updates
on disk it happens where the result is read.

No update counts for more than another, whatever number of examples its client claims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from strategies import options
from strategies.client_rules import PlainSGD
from strategies.cohort_fold import CohortFold, NeedsEachUpdate
from strategies.params import FloatArray, Tensors, elementwise, piece_of, shape_of, spans
from strategies.strategy import SGD, Strategy, WeightedMean
from strategies.update import Update

Matrix = npt.NDArray[np.float64]

_BLOCK = 2**21
"""Float64 values of all updates that are at hand at a time."""


@dataclass(frozen=True)
class Geometry:
    """Where the updates of a cohort lie.

    `products`: float64 [n + 1, n + 1], inner products of the origin (index 0) and of the n updates, all relative to one of them. That
    one is of median length: beside a huge one the differences of the others would be lost to rounding.
    """

    products: Matrix

    def distances(self) -> Matrix:
        """Squared distances between the updates, [n, n]."""
        products = self.products[1:, 1:]
        squares = np.diag(products)
        distances = np.maximum(squares[:, None] + squares - 2 * products, 0)
        np.fill_diagonal(distances, 0)
        return distances

    def distances_to(self, weights: Matrix) -> Matrix:
        """Distances of the updates [n] to the point that is their sum with these weights [n]."""
        point = np.array([1 - weights.sum(), *weights])
        along = self.products @ point
        squares = np.diag(self.products) - 2 * along + point @ along
        return np.asarray(np.sqrt(np.maximum(squares[1:], 0)))

    def mix(self, means: Matrix) -> Geometry:
        """The geometry of weighted means of the updates. `means`: [m, n], rows that sum to 1."""
        rows = np.zeros((len(means) + 1, len(self.products)))
        rows[0, 0], rows[1:, 1:] = 1, means
        return Geometry(rows @ self.products @ rows.T)


@dataclass(frozen=True)
class Combination:
    """How values become one. `reduce`: of the m values of each coordinate, [m, k] to [k].

    `weights`: [m, n], the m vectors as sums of the n updates; None: they are the updates.
    """

    reduce: Callable[[Matrix], Matrix]
    weights: Matrix | None = None

    def after(self, means: Matrix) -> Combination:
        """The same of weighted means of the updates."""
        return Combination(self.reduce, means if self.weights is None else self.weights @ means)


class Rule(ABC):
    """A robust aggregation rule. `needs_geometry`: False: it works on each coordinate alone."""

    needs_geometry: ClassVar[bool] = True

    def fewest_updates(self, malicious: int) -> int:
        """With so many it bears `malicious` of them; by default those are any minority."""
        return 2 * malicious + 1

    @abstractmethod
    def combine(self, updates: int, malicious: int, geometry: Geometry | None) -> Combination: ...


@dataclass(frozen=True)
class RobustAggregator(NeedsEachUpdate):
    """Aggregates by a rule.

    Attributes:
        malicious: how many updates of a cohort may be malicious.
        mix_neighbours: replace each update by the mean of the n - malicious nearest ones first, itself among them. Allouah 2023
            (NNM), Algorithm 2.
        norm_clip: scale an update that is longer than so many median norms of the cohort down to that length; 0: not.
    """

    rule: Rule
    malicious: int
    mix_neighbours: bool = False
    norm_clip: float = 0.0

    @property
    def fewest_updates(self) -> int:
        return self.rule.fewest_updates(self.malicious)

    def start(self, cohort_size: int) -> CohortFold:
        return CohortFold(self.aggregate, WeightedMean("uniform").start(cohort_size))

    def aggregate(self, updates: Sequence[Update]) -> Tensors:
        """The delta of a cohort, float64.

        Raises:
            ValueError: there are fewer than `fewest_updates`.
        """
        if len(updates) < self.fewest_updates:
            raise ValueError(
                f"{len(updates)} updates, of which {self.malicious} may be malicious; expected {self.fewest_updates} or more"
            )
        deltas = [update.delta for update in updates]
        norms = np.array([update.norm for update in updates])
        factors = self._factors(norms)
        geometry = None
        if self.mix_neighbours or self.rule.needs_geometry:
            middle = int(np.argsort(norms, kind="stable")[(len(norms) - 1) // 2])
            geometry = measure(deltas, factors, middle)
        if not self.mix_neighbours:
            return combine(deltas, factors, self.rule.combine(len(deltas), self.malicious, geometry))
        assert geometry is not None
        means = nearest_means(geometry, self.malicious)
        mixed = self.rule.combine(len(deltas), self.malicious, geometry.mix(means))
        return combine(deltas, factors, mixed.after(means))

    def _factors(self, norms: Matrix) -> Matrix | None:
        """What each update is scaled by; None: nothing is."""
        if not self.norm_clip:
            return None
        limit = self.norm_clip * float(np.median(norms))
        factors: Matrix = np.divide(limit, norms, out=np.ones(len(norms)), where=norms > limit)
        return factors


def measure(deltas: Sequence[Tensors], factors: Matrix | None, reference: int) -> Geometry:
    """The geometry of deltas times `factors`, relative to that of index `reference`; read in blocks."""
    products = np.zeros((len(deltas) + 1, len(deltas) + 1))
    values = np.zeros((len(deltas) + 1, max(1, _BLOCK // (len(deltas) + 1))))
    for name in deltas[0]:
        for start, stop in spans(int(np.prod(shape_of(deltas[0], name), dtype=np.int64))):
            pieces = [piece_of(delta, name, start, stop) for delta in deltas]
            for first in range(0, stop - start, values.shape[1]):
                last = min(first + values.shape[1], stop - start)
                block = values[:, : last - first]
                block[0] = 0
                _fill(block[1:], [piece[first:last] for piece in pieces], factors)
                block -= block[1 + reference].copy()
                # Not by BLAS, whose sums depend on its number of threads.
                for index, row in enumerate(block):
                    products[index, index:] += np.einsum("k,jk->j", row, block[index:], optimize=False)
    return Geometry(np.triu(products) + np.triu(products, 1).T)


def combine(deltas: Sequence[Tensors], factors: Matrix | None, how: Combination) -> Tensors:
    """The combination of deltas times `factors`, float64."""
    weights = how.weights
    if weights is not None:
        used: npt.NDArray[np.bool_] = np.asarray(weights.any(axis=0))
        deltas = [delta for delta, is_used in zip(deltas, used, strict=True) if is_used]
        factors = None if factors is None else factors[used]
        weights = weights[:, used]

    def reduce(*pieces: FloatArray) -> FloatArray:
        flat = [piece.reshape(-1) for piece in pieces]
        result = np.empty(flat[0].size)
        width = max(1, _BLOCK // len(flat))
        values = np.empty((len(flat), min(width, flat[0].size)))
        for start in range(0, result.size, width):
            stop = min(start + width, result.size)
            block = values[:, : stop - start]
            _fill(block, [piece[start:stop] for piece in flat], factors)
            if weights is not None:
                block = np.einsum("mn,nk->mk", weights, block, optimize=False)
            result[start:stop] = how.reduce(block)
        return result.reshape(pieces[0].shape)

    return elementwise(reduce, *deltas)


def nearest_means(geometry: Geometry, malicious: int) -> Matrix:
    """For each update the mean of the n - malicious nearest ones, as weights [n, n]."""
    distances = geometry.distances()
    kept = len(distances) - malicious
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :kept]
    means = np.zeros(distances.shape)
    np.put_along_axis(means, nearest, 1 / kept, axis=1)
    return means


def krum_scores(distances: Matrix, malicious: int) -> Matrix:
    """How far each update is from its neighbours, given squared distances [n, n]. Blanchard 2017, section 4.

    The mean squared distance to the n - f - 1 nearest others; the paper takes n - f - 2. With one more, Krum bears any minority:
    Allouah 2023, appendix 8.
    """
    nearest = np.sort(distances, axis=1)[:, 1 : max(2, len(distances) - malicious)]
    return np.asarray(nearest.mean(axis=1) if nearest.size else np.zeros(len(distances)))


def mean_of(indices: npt.NDArray[np.int64], updates: int) -> Combination:
    """The mean of some of the updates."""
    weights = np.zeros((1, updates))
    weights[0, indices] = 1 / len(indices)
    return Combination(lambda values: values[0], weights)


def _fill(block: Matrix, pieces: Sequence[FloatArray], factors: Matrix | None) -> None:
    for index, piece in enumerate(pieces):
        if factors is None:
            block[index] = piece
        else:
            np.multiply(piece, factors[index], out=block[index], dtype=np.float64)


@dataclass(frozen=True)
class RobustPreset:
    """The options that all robust algorithms have: FedAvg with a robust aggregator instead of the mean."""

    name: ClassVar[str]

    malicious: int = options.field(1, "malicious updates in a round that it bears", low=0)
    mix_neighbours: bool = options.field(
        False, "replace each update by the mean of its nearest ones first (NNM, Allouah 2023)"
    )
    norm_clip: float = options.field(
        2.0, "scale updates that are longer than so many median norms of the round; 0 is off", low=0.0
    )
    server_lr: float = options.server_lr()
    momentum: float = options.decay(0.0, "server momentum")

    @abstractmethod
    def rule(self) -> Rule: ...

    def build(self) -> Strategy:
        aggregator = RobustAggregator(self.rule(), self.malicious, self.mix_neighbours, self.norm_clip)
        optimizer = SGD(self.server_lr, self.momentum)
        return Strategy(self.name, PlainSGD(), (), aggregator, optimizer, modes=("sync",))
