"""A client's update as the vector that it masks, and the sum of such vectors as a sum of updates.

The values of the clipped update follow each other in the order of the tensors' names; then comes the training loss, scaled to the same
bound, then the client's weight (`ring.FixedPoint`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from strategies.params import shape_of
from strategies.secagg.ring import FixedPoint, Residues, Ring
from strategies.strategy import ClipNorm
from strategies.summation_tree import PartialSum
from strategies.update import Update

MOST_LOSS = 100.0
"""Training losses are added up beside the updates, as values of this largest magnitude; larger ones count as this one."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class UpdateVector:
    """How the updates of a group's clients become vectors. `shapes`: of an update, by tensor; `point`: its bound is the clipping norm."""

    shapes: Shapes
    point: FixedPoint

    @cached_property
    def values(self) -> int:
        """Values of a client, without its weight."""
        return sum(math.prod(shape) for shape in self.shapes.values()) + 1

    @property
    def ring(self) -> Ring:
        return self.point.ring

    @property
    def length(self) -> int:
        """Residues of a vector."""
        return self.point.length(self.values)

    def encode(self, update: Update, rng: np.random.Generator) -> Residues:
        """The vector of a client, whose update is clipped; its weight is its number of examples, up to the largest weight.

        Raises:
            ValueError: the update has other tensors, or a value is not finite.
        """
        bound = self.point.bound
        found = {name: shape_of(update.delta, name) for name in update.delta}
        if found != dict(self.shapes):
            raise ValueError(f"the update has the tensors {found}, expected {dict(self.shapes)}")
        clipped, _ = ClipNorm(bound).apply(update, {})
        parts = [np.asarray(clipped.delta[name]).reshape(-1) for name in sorted(self.shapes)]
        loss = min(max(update.train_loss, -MOST_LOSS), MOST_LOSS) * (bound / MOST_LOSS)
        values = np.concatenate([*parts, [loss]]).astype(np.float64)
        # Rounding to float32 may leave a value a little above the norm.
        np.clip(values, -bound, bound, out=values)
        return self.point.encode(values, min(update.num_examples, self.point.most_weight), rng)

    def decode(self, numbers: npt.NDArray[np.int64], clients: int) -> PartialSum:
        """The sum of so many clients' updates, given the numbers that the residues of the sum stand for.

        `num_examples` is the sum of the weights: without weights each client counts as one.
        """
        values, weight = self.point.decode_numbers(numbers)
        delta: dict[str, npt.NDArray[np.float64]] = {}
        at = 0
        for name, shape in sorted(self.shapes.items()):
            size = math.prod(shape)
            delta[name] = values[at : at + size].reshape(shape)
            at += size
        loss_sum = float(values[at]) * (MOST_LOSS / self.point.bound)
        return PartialSum(delta, {}, float(weight), clients, weight, loss_sum)
