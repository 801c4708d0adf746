"""How noise is added to values: Gaussian floats from any generator, or a discrete Gaussian on a grid from secure words.

A simulation repeats its noise from the seed, so floats will do. What a real fleet releases must not betray by its last bits what the noise
was added to (Mironov 2012), so there values and noise are multiples of one step (`discrete.add_gaussian`, `RoundedNoise`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from strategies.privacy.noise import discrete
from strategies.privacy.noise.secure import Floats, Source, draw_gaussians


class Normals(Protocol):
    """A source of standard normal values, such as `numpy.random.Generator`."""

    def standard_normal(self, size: tuple[int, ...]) -> Floats: ...


class NoiseSource(Protocol):
    """Adds the noise of one round."""

    def add(self, values: Floats, deviation: float) -> Floats:
        """The values with Gaussian noise of this standard deviation."""
        ...

    def rounding(self, count: int) -> float:
        """How far adding moves a vector of so many values by rounding it, in the L2 norm, at most; in multiples of the deviation."""
        ...


@dataclass(frozen=True)
class FloatNoise:
    """Adds normal values. The same values give the same noise."""

    normals: Normals

    def add(self, values: Floats, deviation: float) -> Floats:
        return np.asarray(values + deviation * self.normals.standard_normal(values.shape))

    def rounding(self, count: int) -> float:
        return 0.0


@dataclass(frozen=True)
class GridNoise:
    """Adds discrete Gaussian noise on a grid whose step is 2^-23 of the deviation or less."""

    source: Source

    def add(self, values: Floats, deviation: float) -> Floats:
        return discrete.add_gaussian(np.asarray(values, np.float64), deviation, self.source)

    def rounding(self, count: int) -> float:
        return _rounding(count)


@dataclass(frozen=True)
class RoundedNoise:
    """Adds normal values, rounded to the same grid as what they are added to, which is as if their sum were rounded.

    For noise that is a sum of several vectors, which a discrete Gaussian is not.
    """

    normals: Normals

    def add(self, values: Floats, deviation: float) -> Floats:
        step = discrete.grid_step(deviation)
        noise = deviation / step * self.normals.standard_normal(values.shape)
        return np.asarray((np.rint(values / step) + np.rint(noise)) * step, np.float64)

    def rounding(self, count: int) -> float:
        return _rounding(count)


def _rounding(count: int) -> float:
    """By half a step in each value; two neighbouring sums, by a whole one."""
    return float(np.sqrt(count) * 2.0 ** (1 - discrete.GRID_BITS))


@dataclass(frozen=True)
class SourceNormals:
    """Normal values from a source of words."""

    source: Source

    def standard_normal(self, size: tuple[int, ...]) -> Floats:
        return draw_gaussians(self.source, int(np.prod(size))).reshape(size)
