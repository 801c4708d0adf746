"""Many of numpy's generators at once: the states that `np.random.default_rng` would give them.

A simulated round needs several generators for each of its clients, and to create one takes as long as a small client
trains. So the seeds of all clients are hashed together (`np.random.SeedSequence`, whose arithmetic numpy promises to keep;
O'Neill 2015, "Developing a seed_seq alternative"), and one generator is set to the states in turn. The numbers
drawn are those of separate generators, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_POOL = 4
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)
_WORD, _LONG = 2**32 - 1, 2**64 - 1

_PCG_HIGH, _PCG_LOW = np.uint64(0x2360ED051FC65DA4), np.uint64(0x4385DF649FCCF645)
_HALF, _LOW_HALF = np.uint64(32), np.uint64(0xFFFFFFFF)
_ZEROS = [0] * _POOL

Words = npt.NDArray[np.uint32]
Wide = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""128-bit numbers as their high and low 64 bits."""


@dataclass(frozen=True)
class PCGStates:
    """The states of several `np.random.PCG64`: 128-bit states and increments, as their high and low 64 bits."""

    state: Wide
    increment: Wide

    def __len__(self) -> int:
        return len(self.state[0])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """State and increment of each."""
        columns = (part.tolist() for part in (*self.state, *self.increment))
        for high, low, increment_high, increment_low in zip(*columns, strict=True):
            yield high << 64 | low, increment_high << 64 | increment_low

    def first(self) -> npt.NDArray[np.uint64]:
        """The first 64-bit number that each generator draws."""
        high, low = _advance(self.state, self.increment)
        mixed, rotation = high ^ low, high >> np.uint64(58)
        turned = (mixed >> rotation) | (mixed << (np.uint64(64) - rotation & np.uint64(63)))
        return np.asarray(turned, np.uint64)

    def first_integers(self) -> list[int]:
        """What `integers(2**63)` returns first."""
        integers: list[int] = (self.first() >> np.uint64(1)).tolist()
        return integers

    def first_randoms(self) -> npt.NDArray[np.float64]:
        """What `random()` returns first."""
        return np.asarray((self.first() >> np.uint64(11)) * 2.0**-53, np.float64)


def states(entropies: Sequence[int | Sequence[int]]) -> PCGStates:
    """The states of `np.random.default_rng(entropy)` for each entropy: an integer, or several, none negative."""
    if all(type(entropy) is int and 0 <= entropy <= _LONG for entropy in entropies):
        numbers = np.array(entropies, "<u8").reshape(-1, 1)
        table = np.zeros((len(entropies), _POOL), np.uint32)
        table[:, :2] = numbers.view("<u4")
        return _states(table)
    split = [_to_words(entropy) for entropy in entropies]
    if all(len(words) <= _POOL for words in split):  # a short entropy is filled up with zeros
        filled = [[*words, *_ZEROS[len(words) :]] for words in split]
        return _states(np.array(filled, np.uint32).reshape(-1, _POOL))
    each = [_states(np.array([words + [0] * (_POOL - len(words))], np.uint32)) for words in split]
    state, increment = (
        tuple(np.concatenate([getattr(one, name)[part] for one in each]) for part in (0, 1))
        for name in ("state", "increment")
    )
    return PCGStates((state[0], state[1]), (increment[0], increment[1]))


def states_for(before: Sequence[int], words: Sequence[int], after: Sequence[int]) -> PCGStates:
    """As `states` of entropies (*before, word, *after), each with a word of its own below 2**32."""
    first, last = _to_words(before), _to_words(after)
    table = np.zeros((len(words), max(_POOL, len(first) + 1 + len(last))), np.uint32)
    table[:, : len(first)] = first
    table[:, len(first)] = words
    table[:, len(first) + 1 : len(first) + 1 + len(last)] = last
    return _states(table)


def _states(table: Words) -> PCGStates:
    """`table`: [seeds, words], at least `_POOL` words."""
    return _seeded(_generate(_mix_entropy(table.T)))


def generators(seeds: Sequence[int]) -> Iterator[np.random.Generator]:
    """A generator as `np.random.default_rng(seed)` for each seed; the next one ends the life of the one before."""
    bits = np.random.PCG64(0)
    generator = np.random.Generator(bits)
    for state, increment in states(seeds):
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": increment},
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
        self._start, self._multiplier = start, multiplier
        self._used = 0

    def __call__(self, values: Words, uses: int) -> Words:
        """So many uses, one after the other: [uses, seeds], given values [seeds], or of each use [uses, seeds]."""
        constants = _constants(self._start, self._multiplier, self._used + uses + 1)[self._used :]
        self._used += uses
        hashed: Words = values ^ constants[:-1]
        hashed *= constants[1:]
        hashed ^= hashed >> _SHIFT
        return hashed


@lru_cache(maxsize=64)
def _constants(start: int, multiplier: int, count: int) -> Words:
    """The first constants of a hash, [count, 1]."""
    powers = itertools.accumulate(
        range(count - 1), lambda before, _: before * multiplier & _WORD, initial=start
    )
    return np.array(list(powers), np.uint32)[:, None]


_OTHERS = [[target for target in range(_POOL) if target != source] for source in range(_POOL)]


def _mix_entropy(table: Words) -> Words:
    """The pools of `SeedSequence`, [_POOL, seeds]. `table`: [words, seeds]."""
    mix_in = _Hash(_INIT_A, _MULT_A)
    pool = mix_in(table[:_POOL], _POOL)
    for source, others in enumerate(_OTHERS):
        pool[others] = _mix(pool[others], mix_in(pool[source], _POOL - 1))
    for words in table[_POOL:]:
        pool = _mix(pool, mix_in(words, _POOL))
    return pool


def _mix(left: Words, right: Words) -> Words:
    mixed: Words = _MIX_LEFT * left - _MIX_RIGHT * right
    mixed ^= mixed >> _SHIFT
    return mixed


def _generate(pool: Words) -> npt.NDArray[np.uint64]:
    """`generate_state(4, np.uint64)` of every pool: [4, seeds]."""
    words = _Hash(_INIT_B, _MULT_B)(np.concatenate([pool, pool]), 2 * _POOL).astype(np.uint64)
    numbers: npt.NDArray[np.uint64] = words[::2] | words[1::2] << _HALF
    return numbers


def _seeded(numbers: npt.NDArray[np.uint64]) -> PCGStates:
    """The states of generators that are seeded with these numbers, [4, seeds], as `PCG64` does it."""
    state_high, state_low, sequence_high, sequence_low = numbers
    increment = (
        sequence_high << np.uint64(1) | sequence_low >> np.uint64(63),
        sequence_low << np.uint64(1) | np.uint64(1),
    )
    start = _add((state_high, state_low), increment)
    return PCGStates(_advance(start, increment), increment)


def _advance(state: Wide, increment: Wide) -> Wide:
    """The next state of each generator."""
    high, low = state
    product = _multiply_high(low) + high * _PCG_LOW + low * _PCG_HIGH
    return _add((product, low * _PCG_LOW), increment)


def _multiply_high(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The high 64 bits of the products with the low half of PCG's multiplier."""
    left_high, left_low = values >> _HALF, values & _LOW_HALF
    right_high, right_low = _PCG_LOW >> _HALF, _PCG_LOW & _LOW_HALF
    cross, other = left_high * right_low, left_low * right_high
    middle = (left_low * right_low >> _HALF) + (cross & _LOW_HALF) + (other & _LOW_HALF)
    high: npt.NDArray[np.uint64] = (
        left_high * right_high + (cross >> _HALF) + (other >> _HALF) + (middle >> _HALF)
    )
    return high


def _add(left: Wide, right: Wide) -> Wide:
    low = left[1] + right[1]
    return left[0] + right[0] + (low < left[1]), low
