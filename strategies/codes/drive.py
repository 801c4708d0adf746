"""DRIVE: one bit a value after a random rotation, or the signs of a share of the values. Vargaftik 2021, Algorithm 1.

A block x with the rotation R is sent as the signs of R(x) and the scale ‖x‖² / ⟨R(x), signs⟩, which makes the estimate unbiased over uniform
random rotations (Theorem 3); with the Hadamard rotation used here it is so nearly, unless few values of a block carry it.

With a `share` below 1 only the values of R(x) with the largest magnitudes are sent, by their signs and positions, and the others count as 0.
The same scale keeps the estimate unbiased, as that of EDEN does for any levels (Vargaftik 2022, Theorem 2.1), but it is as much larger: the
error is 4.5 times the squared norm for a share of 0.028, which only the mean over clients makes small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from strategies import options
from strategies.codes.packing import (
    Body,
    Numbers,
    most_position_bytes,
    pack,
    pack_positions,
    packed_bytes,
    unpack,
    unpack_positions,
)
from strategies.codes.rotation import (
    block_sizes,
    cut,
    num_blocks,
    padded_size,
    rotate,
    rotate_back,
    scale_blocks,
    unbiased_scales,
)
from strategies.codes.vectors import Shapes, Vector, count, join, largest, split
from strategies.params import Params, Tensors


@dataclass(frozen=True)
class Drive:
    share: float = options.field(
        1.0, "of the rotated values, the largest, whose signs are sent", low=0.0, high=1.0, low_open=True
    )

    name = "drive"
    number = 4
    error_feedback = False

    @property
    def parameter(self) -> int:
        return 1 if self.share == 1 else 2

    def write(self, delta: Tensors, rng: np.random.Generator) -> bytes:
        seed, values = int(rng.integers(2**63)), join(delta)
        rotated = rotate(values, seed)
        flat = np.concatenate([each.reshape(-1) for each in rotated]) if rotated else np.zeros(0, np.float32)
        signs = np.where(flat < 0, np.float32(-1), np.float32(1))
        positions = b""
        if self.share < 1 and len(flat):
            sent = self._largest(rotated)
            positions = pack_positions(sent, len(flat))
            signs = np.zeros_like(flat)
            signs[sent] = np.where(flat[sent] < 0, np.float32(-1), np.float32(1))
        scales = unbiased_scales(rotated, cut(signs, len(values)))
        return seed.to_bytes(8, "little") + scales.tobytes() + positions + pack(signs[signs != 0] < 0, 1)

    def read(self, body: Body, shapes: Shapes) -> Params:
        total = count(shapes)
        padded = padded_size(total)
        seed = int(body.take("<u8", 1, "seed")[0])
        scales = body.take_scales(num_blocks(total))
        sent = self._num_sent(total)
        is_sparse = self.share < 1 and padded
        positions = unpack_positions(body, sent, padded) if is_sparse else np.arange(padded)
        signs = np.zeros(padded, np.float32)
        signs[positions] = np.float32(1) - 2 * unpack(body, sent, 1, "signs").astype(np.float32)
        blocks = scale_blocks(cut(signs, total), scales)
        return split(rotate_back(blocks, total, seed), shapes)

    def most_bytes(self, shapes: Shapes) -> int:
        total = count(shapes)
        padded, sent = padded_size(total), self._num_sent(total)
        positions = most_position_bytes(padded, sent) if self.share < 1 and padded else 0
        return 8 + 4 * num_blocks(total) + positions + packed_bytes(sent, 1)

    def _num_sent(self, total: int) -> int:
        """Values of all blocks that are sent."""
        return sum(number * math.ceil(self.share * size) for number, size in block_sizes(total))

    def _largest(self, rotated: list[Vector]) -> Numbers:
        """The positions of the values that are sent: the same share of each block, because the scales are those of blocks."""
        return np.concatenate([*self._largest_of_blocks(rotated)])

    def _largest_of_blocks(self, rotated: list[Vector]) -> Iterator[Numbers]:
        start = 0
        for block in (row for each in rotated for row in each):
            # Numbers near the largest overflow in the rotation.
            yield largest(np.nan_to_num(block), math.ceil(self.share * len(block))) + start
            start += len(block)
