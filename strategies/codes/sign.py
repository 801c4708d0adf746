"""Sign: one bit a value and one scale a tensor; the client adds the error to its next update. Karimireddy 2019, Algorithm 1.

A tensor p of d values becomes ‖p‖₁ / d · sign(p), which leaves at most 1 - ‖p‖₁² / (d ‖p‖₂²) of its squared norm. A zero counts as positive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from strategies.codes.packing import Body, pack, packed_bytes, unpack
from strategies.codes.vectors import Shapes, count, join, split
from strategies.params import Params, Tensors


@dataclass(frozen=True)
class Sign:
    name = "sign"
    number = 3
    parameter = 0
    error_feedback = True

    def write(self, delta: Tensors, rng: np.random.Generator) -> bytes:
        scales = [
            np.abs(value).mean(dtype=np.float64) if value.size else 0.0
            for value in map(np.asarray, delta.values())
        ]
        return np.array(scales, "<f4").tobytes() + pack(join(delta) < 0, 1)

    def read(self, body: Body, shapes: Shapes) -> Params:
        scales = body.take_scales(len(shapes))
        is_negative = unpack(body, count(shapes), 1, "signs").astype(bool)
        sizes = [math.prod(shape) for shape in shapes.values()]
        magnitudes = np.repeat(scales, sizes)
        return split(np.where(is_negative, -magnitudes, magnitudes), shapes)

    def most_bytes(self, shapes: Shapes) -> int:
        return 4 * len(shapes) + packed_bytes(count(shapes), 1)
