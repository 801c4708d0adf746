"""EDEN: a few bits a value after a random rotation. Vargaftik 2022, Algorithm 1.

The values of a rotated block R(x), divided by ‖x‖ / √d, are nearly normal; each becomes the nearest of the 2^bits levels that are best for a
normal distribution (Lloyd 1982). The scale ‖x‖² / ⟨R(x), levels⟩ makes the estimate unbiased over uniform random rotations (Theorem 2.1); with
the Hadamard rotation used here it is so nearly, unless few values of a block carry it. With one bit it would be DRIVE.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strategies import options
from strategies.codes.packing import Body, pack, packed_bytes, unpack
from strategies.codes.rotation import (
    cut,
    num_blocks,
    padded_size,
    rotate,
    rotate_back,
    scale_blocks,
    unbiased_scales,
)
from strategies.codes.vectors import Shapes, Vector, count, join, split
from strategies.params import Params, Tensors

_POSITIVE = {
    2: (0.452780034636, 1.510417608499),
    4: (
        *(0.128395029851, 0.388048299490, 0.656759118532, 0.942340456487),
        *(1.256231197347, 1.618046386022, 2.069017226531, 2.732589570995),
    ),
}
LEVELS = {
    bits: np.array([*(-each for each in reversed(half)), *half], np.float32)
    for bits, half in _POSITIVE.items()
}
"""Increasing; each is the mean of a standard normal value that is nearest to it."""


@dataclass(frozen=True)
class Eden:
    bits: int = options.field(4, "bits of a value", choices=(2, 4))

    name = "eden"
    number = 5
    error_feedback = False

    @property
    def parameter(self) -> int:
        return self.bits

    def write(self, delta: Tensors, rng: np.random.Generator) -> bytes:
        seed = int(rng.integers(2**63))
        rotated = rotate(join(delta), seed)
        numbers = [self._nearest(each) for each in rotated]
        levels = LEVELS[self.bits]
        scales = unbiased_scales(rotated, [levels[each] for each in numbers])
        flat = np.concatenate([each.reshape(-1) for each in numbers]) if numbers else np.zeros(0, np.uint8)
        return seed.to_bytes(8, "little") + scales.tobytes() + pack(flat, self.bits)

    def read(self, body: Body, shapes: Shapes) -> Params:
        total = count(shapes)
        seed = int(body.take("<u8", 1, "seed")[0])
        scales = body.take_scales(num_blocks(total))
        numbers = unpack(body, padded_size(total), self.bits, "levels")
        blocks = scale_blocks(cut(LEVELS[self.bits][numbers], total), scales)
        return split(rotate_back(blocks, total, seed), shapes)

    def most_bytes(self, shapes: Shapes) -> int:
        total = count(shapes)
        return 8 + 4 * num_blocks(total) + packed_bytes(padded_size(total), self.bits)

    def _nearest(self, blocks: Vector) -> np.ndarray:
        """The number of the nearest level of each value."""
        levels = LEVELS[self.bits].astype(np.float64)
        spread = np.sqrt(np.square(blocks, dtype=np.float64).mean(axis=1, keepdims=True))
        normal = blocks / np.where(spread > 0, spread, 1)
        return np.searchsorted((levels[1:] + levels[:-1]) / 2, normal).astype(np.uint8)
