"""A seeded permutation of 0 to n - 1, computed entry by entry: its memory does not depend on n.

A number below n is a pair (left, right) of Z_a × Z_b, where a · b >= n. Each round of a Feistel network adds a keyed hash of
one half to the other, which can be undone, so the network is a permutation of the a · b pairs (Black and Rogaway 2002,
"Ciphers with arbitrary finite domains", section 5; Hoang and Rogaway 2010, alternating numeric Feistel). A result of n or
more is put through it again until one is below n (cycle walking; Black and Rogaway, section 4): a · b exceeds n by less than a,
so few are.

The order is statistically random, not secret: the hash is the finalizer of SplitMix64 (Steele 2014).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

ROUNDS = 10
"""Even, so that each half is changed equally often. Four make a large domain look random; a small one needs more."""

_LARGEST = 2**62


@dataclass(frozen=True)
class Shuffle:
    """A permutation of 0 to `size` - 1; equal seeds give equal permutations on every machine.

    Attributes:
        size: from 0 to 2**62.
        seed: whole numbers >= 0, such as (seed, epoch).
    """

    size: int
    seed: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.size <= _LARGEST:
            raise ValueError(f"size is {self.size}, expected 0 to {_LARGEST}")
        left = math.isqrt(max(0, self.size - 1)) + 1
        right = -(-self.size // left)
        object.__setattr__(self, "_halves", (np.uint64(left), np.uint64(max(1, right))))
        object.__setattr__(self, "_keys", np.random.SeedSequence(self.seed).generate_state(ROUNDS, np.uint64))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: Indices) -> Indices:
        """The entries [N] at `places` [N], each from 0 to `size` - 1."""
        found = self._permute(places.astype(np.uint64))
        outside = np.flatnonzero(found >= self.size)
        while len(outside):
            found[outside] = self._permute(found[outside])
            outside = outside[found[outside] >= self.size]
        return found.astype(np.int64)

    def _permute(self, values: _Words) -> _Words:
        """One pass of the network over numbers below a · b."""
        a, b = self._halves  # type: ignore[attr-defined]
        left, right = np.divmod(values, b)
        for number, key in enumerate(self._keys):  # type: ignore[attr-defined]
            if number % 2:
                right = (right + _hash(left ^ key) % b) % b
            else:
                left = (left + _hash(right ^ key) % a) % a
        permuted: _Words = left * b + right
        return permuted


def _hash(values: _Words) -> _Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: _Words = values ^ (values >> np.uint64(31))
    return hashed
