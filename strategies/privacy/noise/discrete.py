"""Noise on integers: discrete Gaussian and Skellam, drawn for whole arrays.

Probabilities are floats of 53 bits, so a value is as likely as it should be within a factor of 1 ± 1e-15; what is returned are
integers, whose bits tell nothing but their value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from strategies.privacy.noise.secure import Floats, Source, draw_uniforms

Integers = npt.NDArray[np.int64]

LARGEST_SIGMA = 2.0**40
LARGEST_POISSON_MEAN = 2.0**49
GRID_BITS = 24
"""`add_gaussian` rounds to steps between sigma / 2^24 and sigma / 2^23."""


def add_gaussian(values: Floats, sigma: float, source: Source) -> Floats:
    """`values` with Gaussian noise of standard deviation `sigma`, all multiples of `grid_step(sigma)`.

    The values are rounded to the grid first, and the noise is a discrete Gaussian on it: by Canonne 2020, Theorem 4, it protects a sum of
    the L2 sensitivity s as continuous noise does, and a result's last bits say nothing about what was added. Rounding raises the
    sensitivity by at most the step times √d for d values: by 1e-4 of sigma for a million.
    """
    if sigma == 0:
        return values
    step = grid_step(sigma)
    noise = draw_discrete_gaussian(source, sigma / step, values.size).reshape(values.shape)
    return np.asarray((np.rint(values / step) + noise) * step, np.float64)


def grid_step(sigma: float) -> float:
    """The power of two to whose multiples `add_gaussian` rounds."""
    return 2.0 ** (math.floor(math.log2(sigma)) - GRID_BITS + 1)


def draw_discrete_gaussian(source: Source, sigma: float, count: int) -> Integers:
    """Integers x with a probability that is proportional to exp(-x² / 2σ²). Canonne 2020, Algorithm 3.

    A discrete Laplace value y of scale t = ⌊σ⌋ + 1 is kept with probability exp(-(|y| - σ²/t)² / 2σ²).
    Raises `ValueError` for a `sigma` that is negative, not finite or above 2^40.
    """
    _check_sigma(sigma)
    if sigma == 0:
        return np.zeros(count, np.int64)
    scale = math.floor(sigma) + 1

    def propose(number: int) -> Integers:
        drawn = _draw_discrete_laplace(source, scale, number)
        excess = (np.abs(drawn) - sigma**2 / scale) / sigma
        return drawn[_flip_coins(source, excess**2 / 2)]

    return _collect(propose, count)


def draw_skellam(source: Source, variance: float, count: int) -> Integers:
    """Differences of two Poisson values of mean `variance` / 2. Agarwal 2021, section 3.

    Raises `ValueError` for a `variance` that is negative, not finite or above 2^50.
    """
    both = draw_poisson(source, variance / 2, 2 * count)
    return both[:count] - both[count:]


def draw_poisson(source: Source, mean: float, count: int) -> Integers:
    """Poisson values: by Hörmann 1993 (PTRS), and below a mean of 10 as sums over unit intervals (Knuth's method)."""
    if not 0 <= mean <= LARGEST_POISSON_MEAN:
        raise ValueError(f"Poisson values are drawn for means of 0 to 2^49; this one is {mean}")
    if mean >= 10:
        return _collect(lambda number: _propose_poisson(source, mean, number), count)
    drawn = np.zeros(count, np.int64)
    left = np.full(count, float(mean))
    while len(alive := np.flatnonzero(left > 0)):
        left[alive] += np.log(draw_uniforms(source, len(alive)) + 2.0**-54)
        drawn[alive] += left[alive] > 0
    return drawn


def _check_sigma(sigma: float) -> None:
    if not 0 <= sigma <= LARGEST_SIGMA:
        raise ValueError(f"noise on integers has a standard deviation of 0 to 2^40; this one is {sigma}")


def _draw_discrete_laplace(source: Source, scale: int, count: int) -> Integers:
    """At most `count` integers x with a probability that is proportional to exp(-|x| / scale). Canonne 2020, Algorithm 2."""
    rest = _draw_below(source, scale, count)
    rest = rest[_flip_coins(source, rest / scale)]
    size = rest + scale * _count_successes(source, len(rest))
    negative = (source.words(len(size)) & np.uint64(1)).astype(bool)
    kept = ~(negative & (size == 0))  # else 0 would be drawn twice as often
    signed: Integers = np.where(negative, -size, size)[kept]
    return signed


def _draw_below(source: Source, bound: int, count: int) -> Integers:
    """Integers from 0 to `bound` - 1, all equally likely."""
    last = np.uint64(2**64 - 1 - 2**64 % bound)  # the words up to it are a multiple of the bound

    def propose(number: int) -> Integers:
        words = source.words(number)
        return (words[words <= last] % np.uint64(bound)).astype(np.int64)

    return _collect(propose, count)


def _flip_coins(source: Source, exponents: Floats) -> npt.NDArray[np.bool_]:
    """True with the probability exp(-x) for each x >= 0, however small. Canonne 2020, Algorithm 1."""
    whole = np.floor(exponents)
    heads = draw_uniforms(source, len(exponents)) < np.exp(whole - exponents)
    left = np.where(heads, whole, 0)
    while len(alive := np.flatnonzero(left > 0)):
        won = draw_uniforms(source, len(alive)) < math.exp(-1)
        left[alive] = np.where(won, left[alive] - 1, 0)
        heads[alive[~won]] = False
    return heads


def _count_successes(source: Source, count: int) -> Integers:
    """How often coins of the probability 1/e succeed before they fail."""
    successes = np.zeros(count, np.int64)
    alive = np.arange(count)
    while len(alive):
        alive = alive[draw_uniforms(source, len(alive)) < math.exp(-1)]
        successes[alive] += 1
    return successes


def _propose_poisson(source: Source, mean: float, count: int) -> Integers:
    """At most `count` Poisson values. Hörmann 1993, algorithm PTRS."""
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    u = draw_uniforms(source, count) - 0.5
    v = (source.words(count).astype(np.float64) + 0.5) * 2.0**-64
    distance = np.maximum(0.5 - np.abs(u), 2.0**-54)
    value = np.floor((2 * a / distance + b) * u + mean + 0.43)
    possible = (value >= 0) & (value < 2**62)
    value, distance, v = value[possible], distance[possible], v[possible]
    log_ratio = np.log(v * inverse_alpha / (a / distance**2 + b))
    return value[log_ratio <= _log_poisson(value, mean)].astype(np.int64)


_LOG_FACTORIALS = np.array([math.lgamma(value + 1) for value in range(16)])


def _log_poisson(values: Floats, mean: float) -> Floats:
    """ln of the Poisson probability of each value, from 16 on by Stirling's series: off by 1e-13 + 1e-16 √mean near the mean."""
    x = np.maximum(values, 16)
    series = 1 / (12 * x) - 1 / (360 * x**3) + 1 / (1260 * x**5) - 1 / (1680 * x**7)
    excess = x - mean
    large = excess - x * np.log1p(excess / mean) - 0.5 * np.log(2 * np.pi * x) - series
    small = values * math.log(mean) - mean - _LOG_FACTORIALS[np.minimum(values, 15).astype(np.int64)]
    logarithms: Floats = np.where(values < 16, small, large)
    return logarithms


def _collect(propose: Callable[[int], Integers], count: int) -> Integers:
    """The first `count` values of repeated proposals, of which some are rejected."""
    parts: list[Integers] = []
    missing = count
    while missing:
        parts.append(propose(missing + missing // 4 + 16)[:missing])
        missing -= len(parts[-1])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
