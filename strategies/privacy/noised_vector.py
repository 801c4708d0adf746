"""A client's update as the vector that it masks, with its share of the noise of distributed differential privacy.

Nothing else is in it: each client counts as one, and tells no training loss, for nothing would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strategies.params import materialize
from strategies.privacy.noise.distributed import DistributedNoise
from strategies.privacy.noise.secure import Source
from strategies.secagg.ring import Residues, Ring
from strategies.secagg.vector import Shapes
from strategies.summation_tree import PartialSum
from strategies.update import Update


@dataclass(frozen=True)
class NoisedVector:
    """As `strategies.secagg.vector.UpdateVector`.

    Attributes:
        shapes: of an update, by tensor.
        rotation_seed: known to all.
    """

    shapes: Shapes
    noise: DistributedNoise
    rotation_seed: int

    @property
    def ring(self) -> Ring:
        return Ring(self.noise.bits)

    @property
    def length(self) -> int:
        """Residues of a vector."""
        return self.noise.length

    def encode(self, update: Update, source: Source) -> Residues:
        """The vector of a client, whose update is clipped. `source`: of its rounding and its noise.

        Raises:
            ValueError: the update has other tensors, or a value is not finite.
        """
        delta = materialize(update.delta)
        found = {name: value.shape for name, value in delta.items()}
        if found != dict(self.shapes):
            raise ValueError(f"the update has the tensors {found}, expected {dict(self.shapes)}")
        return self.noise.encode(flatten(delta), self.rotation_seed, source).astype(self.ring.word)

    def decode(self, numbers: npt.NDArray[np.int64], clients: int) -> PartialSum:
        """The sum of so many clients' updates, given the numbers that the residues of the sum stand for. Its training loss is NaN."""
        residues = (numbers % self.noise.modulus).astype(np.uint64)
        values = self.noise.decode(residues, self.rotation_seed)
        delta, at = {}, 0
        for name, shape in sorted(self.shapes.items()):
            size = math.prod(shape)
            delta[name] = values[at : at + size].reshape(shape)
            at += size
        return PartialSum(delta, {}, float(clients), clients, clients, math.nan)


def count_values(shapes: Shapes) -> int:
    """Values of an update with tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def flatten(tensors: Mapping[str, npt.NDArray[np.floating]]) -> npt.NDArray[np.float64]:
    """The values of all tensors, in the order of their names."""
    return np.concatenate([np.asarray(tensors[name], np.float64).reshape(-1) for name in sorted(tensors)])
