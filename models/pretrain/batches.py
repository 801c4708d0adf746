"""Which rows make up a global batch, and which of them one rank computes.

Every rank draws the same global batches from the same seed and takes its share of each, so that the
number of ranks changes who computes a gradient and not which gradient is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.labels import PADDING

Indices = npt.NDArray[np.int64]


def global_batches(num_examples: int, batch_size: int, rng: np.random.Generator) -> Iterator[Indices]:
    """One epoch: a permutation of all examples in pieces of `batch_size`, the last one as long as is left."""
    order = rng.permutation(num_examples)
    for start in range(0, num_examples, batch_size):
        yield order[start : start + batch_size]


@dataclass(frozen=True)
class Share:
    """What one of `world_size` ranks takes of every global batch."""

    rank: int = 0
    world_size: int = 1

    def rows(self, batch: int) -> slice:
        """Every `world_size`-th row of a batch of `batch` rows; the first row where nothing would be left.

        Such a rank still has to take part in the gradient exchange. Its row's `weight` is 0.
        """
        return slice(self.rank, None, self.world_size) if self.rank < batch else slice(0, 1)

    def weight(self, y: npt.NDArray[np.int32]) -> float:
        """This rank's part of the labels that count in the global batch `y`, so that a loss that is a mean
        over the rank's own labels, times this, adds up over ranks to the mean over the global batch."""
        mine = int((y[self.rows(len(y))] != PADDING).sum()) if self.rank < len(y) else 0
        return mine / max(1, int((y != PADDING).sum()))


def shifted(x: npt.NDArray[Any], pixels: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Images [B, (C,) H, W], each moved by up to `pixels` up or down and left or right, zeros coming in."""
    if not pixels:
        return x
    height, width = x.shape[-2:]
    padding = [(0, 0)] * (x.ndim - 2) + [(pixels, pixels)] * 2
    places = np.lib.stride_tricks.sliding_window_view(np.pad(x, padding), (height, width), axis=(-2, -1))
    down, right = rng.integers(0, 2 * pixels + 1, size=(2, len(x)))
    # [B, (C,) 2p+1, 2p+1, H, W]: one place chosen per image
    return np.ascontiguousarray(places[np.arange(len(x)), ..., down, right, :, :])
