"""QSGD: each value becomes one of a few levels, up or down by chance, so that it is right on average. Alistarh 2017, section 3.

Values are cut into buckets of 512. A bucket is divided by its largest magnitude (section 5 prefers it to the norm), and each value by
chance rounded to one of the s = 2^(bits-1) - 1 levels above 0, 0, or the s levels below. So no value is off by more than one level, and
the variance of each is at most (scale / 2s)².
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strategies import options
from strategies.codes.packing import Body, dequantize, quantize, quantized_bytes
from strategies.codes.vectors import Shapes, count, join, split
from strategies.params import Params, Tensors


@dataclass(frozen=True)
class QSGD:
    bits: int = options.field(8, "bits of a value", choices=(2, 4, 8))

    name = "qsgd"
    number = 1
    error_feedback = False

    @property
    def parameter(self) -> int:
        return self.bits

    def write(self, delta: Tensors, rng: np.random.Generator) -> bytes:
        return quantize(join(delta), self.bits, rng)

    def read(self, body: Body, shapes: Shapes) -> Params:
        return split(dequantize(body, count(shapes), self.bits), shapes)

    def most_bytes(self, shapes: Shapes) -> int:
        return quantized_bytes(count(shapes), self.bits)
