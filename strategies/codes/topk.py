"""Top-k: the largest values and where they are; the client adds the rest to its next update. Stich 2018, Algorithm 1.

Of d values the k = ⌈share · d⌉ largest magnitudes of the whole update are sent, so at most 1 - k/d of its squared norm is left.
With 8 or 4 `bits` they are rounded as QSGD does it (Basu 2019, Qsparse-local-SGD), with 1 each is sent as its sign and all have the mean of
their magnitudes (Sattler 2019, Algorithm 1); the client keeps that error too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from strategies import options
from strategies.codes.packing import (
    BadCode,
    Body,
    dequantize,
    most_position_bytes,
    pack,
    pack_positions,
    packed_bytes,
    quantize,
    quantized_bytes,
    unpack,
    unpack_positions,
)
from strategies.codes.vectors import Shapes, Vector, count, join, largest, split
from strategies.params import Params, Tensors


@dataclass(frozen=True)
class TopK:
    share: float = options.field(0.01, "of the values that is sent", low=0.0, high=1.0, low_open=True)
    bits: int = options.field(32, "bits of a sent value; 32: as it is, 1: its sign", choices=(1, 4, 8, 32))

    name = "topk"
    number = 2
    error_feedback = True

    @property
    def parameter(self) -> int:
        return self.bits

    def write(self, delta: Tensors, rng: np.random.Generator) -> bytes:
        values = join(delta)
        if not len(values):
            return b""
        positions = largest(values, self._chosen(len(values)))
        sent = values[positions]
        return pack_positions(positions, len(values)) + self._write_values(sent, rng)

    def read(self, body: Body, shapes: Shapes) -> Params:
        values = np.zeros(count(shapes), np.float32)
        if len(values):
            chosen = self._chosen(len(values))
            positions = unpack_positions(body, chosen, len(values))
            values[positions] = self._read_values(body, chosen)
        return split(values, shapes)

    def most_bytes(self, shapes: Shapes) -> int:
        total = count(shapes)
        if not total:
            return 0
        chosen = self._chosen(total)
        sizes = {32: 4 * chosen, 1: 4 + packed_bytes(chosen, 1)}
        return most_position_bytes(total, chosen) + sizes.get(self.bits, quantized_bytes(chosen, self.bits))

    def _chosen(self, total: int) -> int:
        return math.ceil(self.share * total)

    def _write_values(self, sent: Vector, rng: np.random.Generator) -> bytes:
        if self.bits == 32:
            return sent.astype("<f4").tobytes()
        if self.bits == 1:
            scale = np.abs(sent).mean(dtype=np.float64)
            return np.array(scale, "<f4").tobytes() + pack(sent < 0, 1)
        return quantize(sent, self.bits, rng)

    def _read_values(self, body: Body, chosen: int) -> Vector:
        if self.bits == 1:
            (scale,) = body.take_scales(1)
            is_negative = unpack(body, chosen, 1, "signs").astype(bool)
            signed: Vector = np.where(is_negative, -scale, scale)
            return signed
        if self.bits != 32:
            return dequantize(body, chosen, self.bits)
        values = body.take("<f4", chosen, "values").astype(np.float32)
        if not np.isfinite(values).all():
            raise BadCode("the code has a value that is NaN or infinite")
        return values
