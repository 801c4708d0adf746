"""Many of numpy's generators at once: the states that `np.random.default_rng` would give them.

A simulated round needs several generators for each of its clients, and to create one takes as long as a small client
trains. So the seeds of all clients are hashed together (`np.random.SeedSequence`, whose arithmetic numpy promises to keep;
O'Neill 2015, "Developing a seed_seq alternative"), and one generator is set to the states in turn. The numbers
drawn are those of separate generators, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_POOL = 4
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)
_WORD = 0xFFFFFFFF

_PCG_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
_LOW_64, _LOW_128 = 2**64 - 1, 2**128 - 1

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class PCGState:
    """The state of one `np.random.PCG64`: 128-bit state and increment."""

    state: int
    increment: int

    def first(self) -> int:
        """The first 64-bit number that this generator draws."""
        state = (self.state * _PCG_MULTIPLIER + self.increment) & _LOW_128
        mixed, rotation = (state >> 64) ^ (state & _LOW_64), state >> 122
        return ((mixed >> rotation) | (mixed << (64 - rotation))) & _LOW_64

    def first_integer(self) -> int:
        """What `integers(2**63)` returns first."""
        return self.first() >> 1

    def first_random(self) -> float:
        """What `random()` returns first."""
        return (self.first() >> 11) * 2.0**-53


def states(entropies: Sequence[int | Sequence[int]]) -> list[PCGState]:
    """The state of `np.random.default_rng(entropy)` for each entropy: an integer, or several, none negative."""
    split = [_to_words(entropy) for entropy in entropies]
    if all(len(words) <= _POOL for words in split):
        return _states(split, _POOL)  # a short entropy is filled up with zeros
    return [_states([words], max(_POOL, len(words)))[0] for words in split]


def _states(split: list[list[int]], length: int) -> list[PCGState]:
    table = np.array([[*words, *[0] * (length - len(words))] for words in split], np.uint32)
    return list(_seeded(_generate(_mix_entropy(table.reshape(-1, length).T))))


def generators(seeds: Sequence[int]) -> Iterator[np.random.Generator]:
    """A generator as `np.random.default_rng(seed)` for each seed; the next one ends the life of the one before."""
    bits = np.random.PCG64(0)
    generator = np.random.Generator(bits)
    for each in states(seeds):
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": each.state, "inc": each.increment},
            "has_uint32": 0,
            "uinteger": 0,
        }
        yield generator


def _to_words(entropy: int | Sequence[int]) -> list[int]:
    """The 32-bit words of integers, least significant first; zero is one word."""
    words: list[int] = []
    for number in (entropy,) if isinstance(entropy, int) else entropy:
        if number < 0:
            raise ValueError(f"expected entropy of 0 or more, got {number}")
        words.append(number & _WORD)
        while number := number >> 32:
            words.append(number & _WORD)
    return words


class _Hash:
    """The hash of `SeedSequence`, whose constant changes with every use."""

    def __init__(self, start: int, multiplier: int) -> None:
        self._constant, self._multiplier = start, multiplier

    def __call__(self, values: Words) -> Words:
        values = values ^ np.uint32(self._constant)
        self._constant = self._constant * self._multiplier & _WORD
        values *= np.uint32(self._constant)
        values ^= values >> _SHIFT
        return values


def _mix_entropy(table: Words) -> list[Words]:
    """The pools of `SeedSequence`. `table`: [words, seeds]."""
    mix_in = _Hash(_INIT_A, _MULT_A)
    pool = [mix_in(table[index]) for index in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mix(pool[target], mix_in(pool[source]))
    for words in table[_POOL:]:
        for target in range(_POOL):
            pool[target] = _mix(pool[target], mix_in(words))
    return pool


def _mix(left: Words, right: Words) -> Words:
    mixed: Words = _MIX_LEFT * left - _MIX_RIGHT * right
    mixed ^= mixed >> _SHIFT
    return mixed


def _generate(pool: list[Words]) -> list[list[int]]:
    """`generate_state(4, np.uint64)` of every pool: four lists of 64-bit numbers."""
    draw = _Hash(_INIT_B, _MULT_B)
    words = [draw(pool[index % _POOL]).astype(np.uint64) for index in range(8)]
    return [(words[index] | words[index + 1] << np.uint64(32)).tolist() for index in range(0, 8, 2)]


def _seeded(numbers: list[list[int]]) -> Iterator[PCGState]:
    """The states of generators that are seeded with these numbers, as `PCG64` does it."""
    for state_high, state_low, sequence_high, sequence_low in zip(*numbers, strict=True):
        increment = ((sequence_high << 64 | sequence_low) << 1 | 1) & _LOW_128
        start = (state_high << 64 | state_low) + increment
        yield PCGState((start * _PCG_MULTIPLIER + increment) & _LOW_128, increment)
