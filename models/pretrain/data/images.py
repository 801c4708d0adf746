"""What happens to images on their way into a training: brought to one scale, then changed a little anew in every epoch.

Every change of an image comes from the seed, the step and the image's place in the batch (see `batches.Chance`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.options import bounded
from models.pretrain.data.batches import Chance, Indices, Rows, Shifted, Source, places_of

_ROWS = 1024


@dataclass(frozen=True)
class Augmentation:
    """How images are prepared and varied; the default leaves them as they are.

    Attributes:
        normalise: every channel to mean 0 and deviation 1 over the training set, test images with the same numbers.
        flip: share of images that are mirrored left to right.
        crop: images are moved by up to this many pixels, zeros coming in, which is a random crop of the padded image
            (He 2016, section 4.2).
        erase: side of a square that is set to zero around a random place (DeVries 2017, cutout).
    """

    normalise: bool = False
    flip: float = bounded(0.0, 0.0, 1.0)
    crop: int = bounded(0, 0, 64)
    erase: int = bounded(0, 0, 1024)


@dataclass(frozen=True)
class Scale:
    """Mean and deviation of every channel, [C] each; of one channel for images [N, H, W]."""

    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scaled:
    """Images of another source, every channel less its mean and divided by its deviation."""

    source: Source
    scale: Scale

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Indices, chance: Chance) -> Rows:
        x, y = self.source.read(rows, chance)
        by_channel = (-1, 1, 1)
        return (x - self.scale.mean.reshape(by_channel)) / self.scale.deviation.reshape(by_channel), y

    def counted(self, rows: Indices) -> int:
        return self.source.counted(rows)


@dataclass(frozen=True)
class Flipped:
    """Images of another source, a `share` of them mirrored left to right."""

    source: Source
    share: float

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Indices, chance: Chance) -> Rows:
        x, y = self.source.read(rows, chance)
        mirrored = chance.uniform() < self.share
        return np.where(mirrored.reshape(-1, *[1] * (x.ndim - 1)), x[..., ::-1], x), y

    def counted(self, rows: Indices) -> int:
        return self.source.counted(rows)


@dataclass(frozen=True)
class Erased:
    """Images of another source with a square of `side` pixels set to zero; it may reach over the border."""

    source: Source
    side: int

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Indices, chance: Chance) -> Rows:
        x, y = self.source.read(rows, chance)
        height, width = x.shape[-2:]
        draws = chance.uniform(2)
        inside = (
            self._reach(places_of(draws[:, 0], height), height)[:, :, None]
            & self._reach(places_of(draws[:, 1], width), width)[:, None, :]
        )
        return np.where(inside[:, None] if x.ndim == 4 else inside, np.float32(0), x), y

    def counted(self, rows: Indices) -> int:
        return self.source.counted(rows)

    def _reach(self, centre: Indices, extent: int) -> npt.NDArray[np.bool_]:
        """[B, extent]: which pixels along one side the square covers."""
        first = centre[:, None] - self.side // 2
        pixels = np.arange(extent)
        return (pixels >= first) & (pixels < first + self.side)


def augmented(source: Source, how: Augmentation) -> Source:
    """A training set whose images vary, in the order flip, crop, erase."""
    if how.flip:
        source = Flipped(source, how.flip)
    if how.crop:
        source = Shifted(source, how.crop)
    if how.erase:
        source = Erased(source, how.erase)
    return source


def scale_of(x: npt.NDArray[Any]) -> Scale:
    """Mean and deviation of images [N, (C,) H, W], read some at a time. A channel that is the same everywhere has 1."""
    channels = x.shape[1] if x.ndim == 4 else 1
    count, sums, squares = 0, np.zeros(channels), np.zeros(channels)
    for start in range(0, len(x), _ROWS):
        part = np.asarray(x[start : start + _ROWS], np.float64).reshape(-1, channels, *x.shape[-2:])
        count += part.shape[0] * part.shape[2] * part.shape[3]
        sums += part.sum(axis=(0, 2, 3))
        squares += np.square(part).sum(axis=(0, 2, 3))
    mean = sums / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return Scale(mean.astype(np.float32), np.where(deviation > 0, deviation, 1).astype(np.float32))
