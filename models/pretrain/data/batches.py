"""Which rows make up a global batch, and which of them one process computes.

A batch is a function of seed and step alone. So every process draws the same one, any number of processes can share
it, and a training can resume at any step without having seen those before. The number of processes changes who
computes a gradient, not which gradient is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from models.labels import counting, filling
from models.pretrain.data.shuffle import Indices as Indices
from models.pretrain.data.shuffle import Shuffle
from models.pretrain.objective import as_targets

_PLACES = 4096
"""Places of the order computed together, because a call of NumPy costs more than an entry."""

Rows = tuple[npt.NDArray[Any], npt.NDArray[np.int32]]


@dataclass(frozen=True)
class BatchRandom:
    """Random numbers for some rows of a global batch: the same as if all of its rows were read.

    What happens to a row depends on the seed, the step and its position, not on who reads it.

    Attributes:
        rng: of this batch.
        rows: size of the global batch.
        places: positions of the rows that are read.
    """

    rng: np.random.Generator
    rows: int
    places: Indices

    def uniform(self, *shape: int) -> npt.NDArray[np.float64]:
        """Numbers in [0, 1), [len(places), *shape]. Draws those of the whole batch."""
        return self.rng.random((self.rows, *shape))[self.places]


class Source(Protocol):
    """A training set: examples by index."""

    def __len__(self) -> int:
        """Number of examples."""

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        """Inputs [B, …] and labels, int32 [B] or [B, T], or float32 quantities [B], of `rows`, in that order; all randomness comes from `random`."""

    def counted(self, rows: Indices) -> int:
        """Number of their labels that count, reading no more than needed."""


@dataclass(frozen=True)
class Arrays:
    """A source that is two arrays, in memory or mapped from files."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.x)

    def read(self, rows: Indices, random: BatchRandom | None = None) -> Rows:
        return np.asarray(self.x[rows]), np.asarray(self.y[rows])

    def counted(self, rows: Indices) -> int:
        return int(counting(self.y[rows]).sum())


@dataclass(frozen=True)
class Transformed:
    """Examples of another source, as many and with as many labels; subclasses transform what `read` returns."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def counted(self, rows: Indices) -> int:
        return self.source.counted(rows)


@dataclass(frozen=True)
class Shifted(Transformed):
    """Images of another source, each shifted by up to `pixels` in both directions, drawn anew in every epoch."""

    pixels: int

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        x, y = self.source.read(rows, random)
        down, right = scale_to_int(random.uniform(2), 2 * self.pixels + 1).T
        return shift_images(x, self.pixels, down, right), y


@dataclass(frozen=True)
class Batch:
    """One process's share of a global batch.

    Attributes:
        x, y: inputs and labels; labels that do not count are as `models.labels.filling` says.
        counted: labels that count in the whole global batch, at least 1: losses are sums divided by it.
        rows: indices of the examples, in order.
        global_rows: rows of the whole global batch.
    """

    x: torch.Tensor
    y: torch.Tensor
    counted: int
    rows: tuple[int, ...] = ()
    global_rows: int = 1

    def microbatches(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`number` micro-batches, as even as possible. An empty one becomes one row that does not count, so that all
        processes have the same number."""
        blank = self.x[:1], torch.full_like(self.y[:1], filling(self.y))
        pieces = zip(self.x.tensor_split(number), self.y.tensor_split(number), strict=True)
        return [(x, y) if len(x) else blank for x, y in pieces]


@dataclass(frozen=True)
class Share:
    """One process's share of every global batch.

    Attributes:
        rows: one weight for every dp rank: its share of the batch relative to the others.
        place: index of this process among them.
        length_place, length_shares: this process's part of every sequence, and the number of parts.
        pad_to: rows to fill every global batch up to with labels that do not count; 0: no padding.
    """

    rows: tuple[int, ...] = (1,)
    place: int = 0
    length_place: int = 0
    length_shares: int = 1
    pad_to: int = 0

    def of(self, count: int) -> slice:
        """This process's rows of `count`. Shares differ by less than a row from the weights in `rows`."""
        ends = np.floor(np.cumsum([0, *self.rows]) / sum(self.rows) * count + 0.5).astype(int)
        return slice(int(ends[self.place]), int(ends[self.place + 1]))


@dataclass(frozen=True)
class _Order:
    """Examples of an epoch in their order, from place `start` on."""

    epoch: int
    start: int
    rows: Indices

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


class Batches:
    """The global batches of a training: an epoch is a permutation of all examples, and its last batch is the remainder.

    The permutation is computed piece by piece (`models.pretrain.data.shuffle`), so memory does not depend on the number of
    examples.

    Args:
        shift: largest random shift of images in pixels, drawn anew in every epoch.
    """

    def __init__(self, source: Source, batch_size: int, seed: int, share: Share, shift: int = 0) -> None:
        self.source: Source = Shifted(source, shift) if shift else source
        self.batch_size, self.seed, self.share = batch_size, seed, share
        self.steps_per_epoch = -(-len(source) // batch_size)
        self._computed = _Order(-1, 0, np.empty(0, np.int64))

    def rows(self, step: int) -> Indices:
        """Indices of the examples in the global batch of `step`, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start, size = place * self.batch_size, len(self.source)
        end = min(start + self.batch_size, size)
        computed = self._computed
        if not (computed.epoch == epoch and computed.start <= start and end <= computed.end):
            places = np.arange(start, min(start + max(self.batch_size, _PLACES), size))
            computed = _Order(epoch, start, Shuffle(size, (self.seed, epoch))[places])
            self._computed = computed
        return computed.rows[start - computed.start : end - computed.start]

    def __getitem__(self, step: int) -> Batch:
        """This process's share of the global batch of `step`; no other rows are read. An empty share becomes one row
        that does not count."""
        rows = self.rows(step)
        places = np.arange(max(len(rows), self.share.pad_to))
        places = places[self.share.of(len(places))]
        if not len(places):
            places = np.array([len(rows)])
        filled = places >= len(rows)
        places = np.where(filled, 0, places)
        random = BatchRandom(np.random.default_rng([self.seed, step, 1]), len(rows), places)
        x, y = self.source.read(rows[places], random)
        if filled.any():
            y = y.copy()
            y[filled] = filling(y)
        if self.share.length_shares > 1:
            part = x.shape[1] // self.share.length_shares
            along = slice(self.share.length_place * part, (self.share.length_place + 1) * part)
            x, y = x[:, along], y[:, along]
        return Batch(
            torch.from_numpy(np.ascontiguousarray(x)),
            as_targets(torch.from_numpy(np.ascontiguousarray(y))),
            max(1, self.source.counted(rows)),
            tuple(rows[places].tolist()),
            len(rows),
        )


def global_batches(num_examples: int, batch_size: int, rng: np.random.Generator) -> Iterator[Indices]:
    """One epoch: a permutation of all examples in pieces of `batch_size`; the last one is the remainder."""
    order = rng.permutation(num_examples)
    for start in range(0, num_examples, batch_size):
        yield order[start : start + batch_size]


def shifted(x: npt.NDArray[Any], pixels: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Images [B, (C,) H, W], each shifted by up to `pixels` in both directions and padded with zeros."""
    if not pixels:
        return x
    down, right = rng.integers(0, 2 * pixels + 1, size=(2, len(x)))
    return shift_images(x, pixels, down, right)


def shift_images(x: npt.NDArray[Any], pixels: int, down: Indices, right: Indices) -> npt.NDArray[Any]:
    """Windows of images [B, (C,) H, W] padded with `pixels` zeros on every side, at `down` and `right`, [B] each."""
    height, width = x.shape[-2:]
    padding: Sequence[tuple[int, int]] = [(0, 0)] * (x.ndim - 2) + [(pixels, pixels)] * 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, padding), (height, width), axis=(-2, -1))
    # [B, (C,) 2p+1, 2p+1, H, W]: one window chosen per image
    return np.ascontiguousarray(windows[np.arange(len(x)), ..., down, right, :, :])


def scale_to_int(uniform: npt.NDArray[np.float64], count: int) -> Indices:
    """Integers below `count` from numbers in [0, 1)."""
    return (uniform * count).astype(np.int64)
