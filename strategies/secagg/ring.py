"""The ring of integers modulo 2^bits, and real values as fixed-point numbers in it.

A sum modulo 2^32 (2^16, 2^64) and then modulo 2^bits is the sum modulo 2^bits. So residues are added as machine words, and the
superfluous bits are dropped once, before a vector is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from strategies.codes.packing import MOST_BITS

Residues = npt.NDArray[np.unsignedinteger]
Vector = npt.NDArray[np.floating]

FEWEST_BITS = 2
_PIECE = 2**16


@dataclass(frozen=True)
class Ring:
    """Integers modulo 2**bits, in words of 16, 32 or 64 bits. `bits`: 2 to 56."""

    bits: int

    def __post_init__(self) -> None:
        if not FEWEST_BITS <= self.bits <= MOST_BITS:
            raise ValueError(f"a ring of {self.bits} bits: expected {FEWEST_BITS} to {MOST_BITS}")

    @cached_property
    def word(self) -> np.dtype[np.unsignedinteger]:
        """Little-endian, since masks are drawn as bytes."""
        return np.dtype(next(f"<u{size}" for size in (2, 4, 8) if self.bits <= 8 * size))

    def zeros(self, length: int) -> Residues:
        return np.zeros(length, self.word)

    def reduce(self, words: Residues) -> Residues:
        """The residues from 0 to 2**bits - 1, in place."""
        words &= self.word.type(2**self.bits - 1)
        return words

    def from_signed(self, numbers: npt.NDArray[np.int64]) -> Residues:
        return self.reduce(numbers.astype(np.uint64).astype(self.word))

    def to_signed(self, residues: Residues) -> npt.NDArray[np.int64]:
        """The numbers from -2**(bits-1) to 2**(bits-1) - 1 that these residues stand for."""
        unused = 64 - self.bits
        shifted = (residues.astype(np.uint64) << np.uint64(unused)).view(np.int64)
        shifted >>= unused
        return shifted


@dataclass(frozen=True)
class FixedPoint:
    """How a client's values and its weight become residues, so that the sum over the clients cannot wrap around.

    A value is multiplied by weight / most_weight and rounded to a multiple of bound / levels. The weight, a whole number, is split into
    digits to the base levels + 1 and follows the values, so the weighted sum and the sum of the weights both come out.

    Attributes:
        clients: the most clients of a sum.
        bound: the largest magnitude of a value.
        value_bits: bits of a rounded value, its sign included: 2 to 32.
        most_weight: the largest weight; 1 makes all clients equal.
    """

    clients: int
    bound: float
    value_bits: int = 16
    most_weight: int = 1

    def __post_init__(self) -> None:
        if not (self.clients >= 1 and self.most_weight >= 1 and 2 <= self.value_bits <= 32):
            raise ValueError(f"{self}: expected 1 client or more, a weight of 1 or more, and 2 to 32 bits")
        if not 0 < self.bound < float("inf"):
            raise ValueError(f"the bound of a value is {self.bound}, expected a number above 0")

    @property
    def levels(self) -> int:
        """Magnitudes above 0 of a rounded value."""
        return int(2 ** (self.value_bits - 1) - 1)

    @cached_property
    def ring(self) -> Ring:
        """The smallest ring that holds every sum."""
        return Ring((2 * self.clients * self.levels).bit_length())

    @cached_property
    def weight_digits(self) -> int:
        """Residues that a weight takes."""
        digits, weight = 1, self.most_weight
        while weight := weight // (self.levels + 1):
            digits += 1
        return digits

    def length(self, values: int) -> int:
        """Residues of a vector of so many values."""
        return values + self.weight_digits

    def encode(self, values: Vector, weight: int, rng: np.random.Generator | None = None) -> Residues:
        """The residues of one client's values and weight.

        Rounds to the nearest level, or with `rng` up or down by chance, so that the mean is unbiased.

        Raises:
            ValueError: a value is beyond the bound or NaN, or the weight is not from 0 to `most_weight`.
        """
        if not 0 <= weight <= self.most_weight:
            raise ValueError(f"the weight is {weight}, expected 0 to {self.most_weight}")
        residues = self.ring.zeros(self.length(len(values)))
        scale = weight / self.most_weight * self.levels / self.bound
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE].astype(np.float64)
            if not (np.abs(piece) <= self.bound).all():
                raise ValueError(
                    f"a value is beyond the bound of {self.bound}, or NaN: clip the vector first"
                )
            piece *= scale
            piece = np.rint(piece) if rng is None else np.floor(piece + rng.random(len(piece)))
            # A value at the bound may be a rounding error above the top level.
            rounded = np.clip(piece, -self.levels, self.levels).astype(np.int64)
            residues[start : start + len(piece)] = self.ring.from_signed(rounded)
        for place in range(self.weight_digits):
            weight, digit = divmod(weight, self.levels + 1)
            residues[len(values) + place] = digit
        return residues

    def decode_sums(self, residues: Residues) -> tuple[npt.NDArray[np.float64], int]:
        """The weighted sum of the values, and the sum of the weights, of the clients in a sum."""
        return self.decode_numbers(self.ring.to_signed(residues))

    def decode_numbers(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], int]:
        """As `decode_sums`, given the numbers that residues stand for, or the sums of those of several groups."""
        values = len(numbers) - self.weight_digits
        weight: int = sum(
            int(digit) * (self.levels + 1) ** place for place, digit in enumerate(numbers[values:].tolist())
        )
        step = self.bound * self.most_weight / self.levels
        return numbers[:values].astype(np.float64) * step, weight
