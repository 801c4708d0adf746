"""Rows of a training set that no step trains on, to score the model during the training.

Only the numbers of the rows held out are in memory; those of the others are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.pretrain.data.batches import Batches, BatchRandom, Indices, Rows, Source


@dataclass(frozen=True)
class Part:
    """Some rows of a source. `rows`: their numbers, ascending."""

    source: Source
    rows: Indices

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        return self.source.read(self.rows[rows], random)

    def counted(self, rows: Indices) -> int:
        return self.source.counted(self.rows[rows])


@dataclass(frozen=True)
class Rest:
    """All rows of a source but some. `left_out`: their numbers, ascending and distinct."""

    source: Source
    left_out: Indices

    def __len__(self) -> int:
        return len(self.source) - len(self.left_out)

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        return self.source.read(self.original(rows), random)

    def counted(self, rows: Indices) -> int:
        return self.source.counted(self.original(rows))

    def original(self, rows: Indices) -> Indices:
        """The numbers in the whole source: a row comes after as many left out as have at most `row` others before them."""
        others_before = self.left_out - np.arange(len(self.left_out))
        return rows + np.searchsorted(others_before, rows, side="right")


def draw(rows: int, count: int, rng: np.random.Generator) -> Indices:
    """`count` of `rows` row numbers, ascending."""
    return np.sort(rng.choice(rows, count, replace=False, shuffle=False)).astype(np.int64)


class OrderedBatches(Batches):
    """One pass over a source in the order of its rows, in batches shared like those of a training.

    Randomness of the source is the same in every pass.
    """

    def rows(self, step: int) -> Indices:
        return np.arange(step * self.batch_size, min((step + 1) * self.batch_size, len(self.source)))
