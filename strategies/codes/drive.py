"""DRIVE: one bit a value after a random rotation. Vargaftik 2021, Algorithm 1.

A block x with the rotation R is sent as the signs of R(x) and the scale ‖x‖² / ‖R(x)‖₁, which makes the estimate unbiased over uniform
random rotations (Theorem 3); with the Hadamard rotation used here it is so nearly, unless few values of a block carry it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
from strategies.codes.vectors import Shapes, count, join, split
from strategies.params import Params, Tensors


@dataclass(frozen=True)
class Drive:
    name = "drive"
    number = 4
    parameter = 1
    error_feedback = False

    def write(self, delta: Tensors, rng: np.random.Generator) -> bytes:
        seed = int(rng.integers(2**63))
        rotated = rotate(join(delta), seed)
        scales = unbiased_scales(
            rotated, [np.where(each < 0, np.float32(-1), np.float32(1)) for each in rotated]
        )
        signs = [(each < 0).reshape(-1) for each in rotated]
        flat = np.concatenate(signs) if signs else np.zeros(0, np.bool_)
        return seed.to_bytes(8, "little") + scales.tobytes() + pack(flat, 1)

    def read(self, body: Body, shapes: Shapes) -> Params:
        total = count(shapes)
        seed = int(body.take("<u8", 1, "seed")[0])
        scales = body.take_scales(num_blocks(total))
        is_negative = unpack(body, padded_size(total), 1, "signs")
        signs = np.float32(1) - 2 * is_negative.astype(np.float32)
        blocks = scale_blocks(cut(signs, total), scales)
        return split(rotate_back(blocks, total, seed), shapes)

    def most_bytes(self, shapes: Shapes) -> int:
        total = count(shapes)
        return 8 + 4 * num_blocks(total) + packed_bytes(padded_size(total), 1)
