"""Image preprocessing for training: normalisation, then random augmentation, drawn anew in every epoch.

All randomness comes from the seed, the step and the image's position in the batch (see `batches.BatchRandom`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.options import bounded
from models.pretrain.data.batches import (
    BatchRandom,
    Indices,
    Rows,
    Shifted,
    Source,
    Transformed,
    scale_to_int,
)

_ROWS = 1024


@dataclass(frozen=True)
class Augmentation:
    """How images are normalised and augmented; the default leaves them unchanged.

    Attributes:
        normalise: every channel to mean 0 and deviation 1 over the training set; test images with the same numbers.
        flip: share of images mirrored left to right.
        crop: largest shift in pixels, filled with zeros, which is a random crop of the padded image (He 2016,
            section 4.2).
        erase: side of a square set to zero around a random position (DeVries 2017, cutout).
    """

    normalise: bool = False
    flip: float = bounded(0.0, 0.0, 1.0)
    crop: int = bounded(0, 0, 64)
    erase: int = bounded(0, 0, 1024)


@dataclass(frozen=True)
class Scaled(Transformed):
    """Images of another source, every channel minus its mean, divided by its deviation, [C] each."""

    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        x, y = self.source.read(rows, random)
        return (x - self.mean.reshape(-1, 1, 1)) / self.deviation.reshape(-1, 1, 1), y


@dataclass(frozen=True)
class Flipped(Transformed):
    """Images of another source, a `share` of them mirrored left to right."""

    share: float

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        x, y = self.source.read(rows, random)
        mirrored = random.uniform() < self.share
        return np.where(mirrored.reshape(-1, *[1] * (x.ndim - 1)), x[..., ::-1], x), y


@dataclass(frozen=True)
class Erased(Transformed):
    """Images of another source with a square of `side` pixels set to zero; it may extend past the border."""

    side: int

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        x, y = self.source.read(rows, random)
        height, width = x.shape[-2:]
        draws = random.uniform(2)
        inside = (
            self._reach(scale_to_int(draws[:, 0], height), height)[:, :, None]
            & self._reach(scale_to_int(draws[:, 1], width), width)[:, None, :]
        )
        return np.where(inside[:, None] if x.ndim == 4 else inside, np.float32(0), x), y

    def _reach(self, centre: Indices, extent: int) -> npt.NDArray[np.bool_]:
        """[B, extent]: which pixels along one side the square covers."""
        first = centre[:, None] - self.side // 2
        pixels = np.arange(extent)
        return (pixels >= first) & (pixels < first + self.side)


def augment(source: Source, augmentation: Augmentation) -> Source:
    """A training set with augmented images, in the order flip, crop, erase."""
    if augmentation.flip:
        source = Flipped(source, augmentation.flip)
    if augmentation.crop:
        source = Shifted(source, augmentation.crop)
    if augmentation.erase:
        source = Erased(source, augmentation.erase)
    return source


def scale_of(x: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean and deviation, [C] each, of images [N, (C,) H, W], read in pieces; C is 1 for images [N, H, W].

    A constant channel has deviation 1.
    """
    channels = x.shape[1] if x.ndim == 4 else 1
    count, sums, squares = 0, np.zeros(channels), np.zeros(channels)
    for start in range(0, len(x), _ROWS):
        part = np.asarray(x[start : start + _ROWS], np.float64).reshape(-1, channels, *x.shape[-2:])
        count += part.shape[0] * part.shape[2] * part.shape[3]
        sums += part.sum(axis=(0, 2, 3))
        squares += np.square(part).sum(axis=(0, 2, 3))
    mean = sums / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return mean.astype(np.float32), np.where(deviation > 0, deviation, 1).astype(np.float32)
