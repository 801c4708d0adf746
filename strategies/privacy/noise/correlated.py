"""Correlated noise for DP-FTRL: the noise of later rounds takes back some of what earlier rounds added.

A model that sums up T rounds suffers from the noise of all rounds together. Independent noise adds up; correlated noise cancels in part.
A mechanism is a factorization A = B C of the matrix of prefix sums (A_ij = 1 for j <= i). The mechanism releases C x + z, of which A x + B z
follows, x being the sums of the rounds and z Gaussian. So all T rounds together are one Gaussian mechanism, whose sensitivity is that
of x -> C x: no client's sampling has to be assumed, only how often it takes part. Denisov 2022; Choquette-Choo 2023a, section 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from strategies.privacy.noise.secure import Floats

Draw = Callable[[int], Floats]
"""The standard Gaussian vector of a number, always the same for a number, independent of those of other numbers."""


@dataclass(frozen=True)
class Participation:
    """A client takes part in some of `rounds` rounds, in two of them only if they lie at least `separation` rounds apart.

    `times`: in how many it takes part at most, if that is known; None: in as many as the separation allows.
    """

    rounds: int
    separation: int
    times: int | None = None

    @property
    def most(self) -> int:
        """In how many rounds a client takes part at most."""
        most = math.ceil(self.rounds / self.separation)
        return most if self.times is None else min(most, self.times)


class CorrelatedNoise(Protocol):
    def sensitivity(self, participation: Participation) -> float:
        """How far one client, of norm 1 in each of its rounds, moves C x in the L2 norm: at most this."""
        ...

    def stream(self, draw: Draw) -> Iterator[Floats]:
        """The noise of each round's sum, for a standard deviation of 1 in z: the rows of A^-1 B z.

        The same `draw` gives the same noise, so a run that resumes draws it again.
        """
        ...


@dataclass(frozen=True)
class BandedNoise:
    """C is a lower triangular Toeplitz matrix of `bands` diagonals, those of the square root of A. Kalinin 2024, section 3.

    With no more bands than the rounds from one participation to the next, the columns of a client's rounds have no row in common, so they
    are orthogonal (Choquette-Choo 2023b). One band is independent noise, that of DP-SGD. Keeps `bands` vectors.
    """

    bands: int

    def coefficients(self) -> list[float]:
        """The diagonals of C from the main one down: binomial(2k, k) / 4^k."""
        values = [1.0]
        for k in range(1, self.bands):
            values.append(values[-1] * (2 * k - 1) / (2 * k))
        return values

    def sensitivity(self, participation: Participation) -> float:
        """Exact. Raises `ValueError` for more bands than the separation."""
        if self.bands > participation.separation:
            raise ValueError(
                f"{self.bands} bands are more than the {participation.separation} rounds between two participations"
            )
        squares = np.cumsum(np.square(self.coefficients()))
        # A column begins in the round of a participation and is cut off by the last round.
        lengths = participation.rounds - participation.separation * np.arange(participation.most)
        return float(np.sqrt(squares[np.minimum(lengths, self.bands) - 1].sum()))

    def stream(self, draw: Draw) -> Iterator[Floats]:
        _, *lower = self.coefficients()
        past: deque[Floats] = deque(maxlen=self.bands - 1)  # the last round's noise first
        for number in count():
            noise = draw(number).copy()
            for coefficient, earlier in zip(lower, past, strict=False):
                noise -= coefficient * earlier
            past.appendleft(noise)
            yield noise


@dataclass(frozen=True)
class TreeNoise:
    """C sums up the rounds below each node of a binary tree; B estimates prefix sums from nodes. Kairouz 2021, section 3.

    The estimate of a node is the mean of what the node itself says and the sum of the estimates of its children, weighted by the inverse
    of their variances (Honaker 2015, "estimation from below"). Keeps a vector for each level, and two more.
    """

    def sensitivity(self, participation: Participation) -> float:
        """An upper bound; exact for one participation, and where separation and rounds are powers of two.

        A node of n rounds sees a client ⌈n / separation⌉ times at most, and the nodes of a level see it `most` times together.
        """
        total = 0
        for level in range(participation.rounds.bit_length()):
            at_once = min(math.ceil(2**level / participation.separation), participation.most)
            full, rest = divmod(participation.most, at_once)
            total += full * at_once**2 + rest**2
        return math.sqrt(total)

    def stream(self, draw: Draw) -> Iterator[Floats]:
        nodes: list[tuple[int, Floats]] = []  # level and estimate of the complete subtrees, the largest first
        numbers = count()
        before: Floats | float = 0.0
        while True:
            level, estimate = 0, draw(next(numbers))
            while nodes and nodes[-1][0] == level:
                below = nodes.pop()[1] + estimate
                level += 1
                weight = self.variance(level)  # of the node's own value, whose variance is 1
                estimate = weight * draw(next(numbers)) + (1 - weight) * below
            nodes.append((level, estimate))
            prefix = np.sum([each for _, each in nodes], axis=0)
            yield prefix - before
            before = prefix

    @staticmethod
    def variance(level: int) -> float:
        """Of the estimate of a node over 2^level rounds: 1 / (2 - 2^-level)."""
        return 1 / (2 - 2.0**-level)


def correlated_matrix(noise: CorrelatedNoise, rounds: int) -> Floats:
    """The matrix [rounds, vectors drawn] that turns z into the noise of each round's sum."""
    most = 2 * rounds

    def probe(number: int) -> Floats:
        return np.asarray(np.arange(most) == number, np.float64)

    return np.stack([row for row, _ in zip(noise.stream(probe), range(rounds), strict=False)])
