"""PowerSGD: each matrix as the product of two thin ones; the client adds the error to its next update. Vogels 2019, Algorithm 1.

A tensor of two or more axes is the matrix M of its first axis and all others. From a random Q the power iteration P = MQ, P orthonormal,
Q = MᵀP gives M ≈ PQᵀ. The paper takes one step and goes on from the last round's Q, because its workers must add up P and Q in between. A
client works alone: it takes two steps and keeps no Q. Tensors that two factors would not make smaller travel as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from strategies import options
from strategies.codes.packing import Body
from strategies.codes.vectors import Shapes, Vector
from strategies.params import Params, Tensors

STEPS = 2


@dataclass(frozen=True)
class PowerSGD:
    rank: int = options.field(2, "rank of the factors", low=1, high=64)

    name = "powersgd"
    number = 6
    error_feedback = True

    @property
    def parameter(self) -> int:
        return self.rank

    def write(self, delta: Tensors, rng: np.random.Generator) -> bytes:
        return b"".join(
            part.astype("<f4").tobytes()
            for value in delta.values()
            for part in self._factors(np.asarray(value), rng)
        )

    def read(self, body: Body, shapes: Shapes) -> Params:
        return {name: self._read_tensor(body, shape) for name, shape in shapes.items()}

    def most_bytes(self, shapes: Shapes) -> int:
        return 4 * sum(
            self.rank * sum(_sides(shape)) if self._is_factored(shape) else math.prod(shape)
            for shape in shapes.values()
        )

    def _is_factored(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1 and self.rank * sum(_sides(shape)) < math.prod(shape)

    def _factors(self, value: Vector, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        if not self._is_factored(value.shape):
            return (value,)
        matrix = value.reshape(_sides(value.shape)).astype(np.float64)
        right = rng.standard_normal((matrix.shape[1], self.rank))
        for _ in range(STEPS):
            left = np.linalg.qr(matrix @ right)[0]
            right = matrix.T @ left
        return left, right

    def _read_tensor(self, body: Body, shape: tuple[int, ...]) -> Vector:
        if not self._is_factored(shape):
            return body.take("<f4", math.prod(shape), "values").astype(np.float32).reshape(shape)
        rows, columns = _sides(shape)
        left = body.take("<f4", rows * self.rank, "left factor").astype(np.float32).reshape(rows, self.rank)
        right = (
            body.take("<f4", columns * self.rank, "right factor")
            .astype(np.float32)
            .reshape(columns, self.rank)
        )
        matrix = np.zeros((rows, columns), np.float32)
        # One rank after the other, because a matrix product may differ in its last bits from one processor to the next.
        for index in range(self.rank):
            matrix += left[:, index, None] * right[None, :, index]
        return matrix.reshape(shape)


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix."""
    return shape[0], math.prod(shape[1:])
