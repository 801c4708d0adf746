"""Distributed differential privacy: each client adds a share of the noise, on integers, before its vector enters a secure sum.

A client clips its update, rotates it so that no value stands out, divides it by the granularity, rounds it by chance to integers, adds its
share of the noise and reduces all modulo 2^bits. Whoever sees only the sum modulo 2^bits sees an update with the noise of all clients.
Nobody has to be trusted with a single update, or with adding the noise. Kairouz 2021, Algorithms 1 and 2; Agarwal 2021, Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from strategies.codes import rotation
from strategies.privacy.noise.discrete import Integers, draw_discrete_gaussian, draw_skellam
from strategies.privacy.noise.secure import Floats, Source, Words, draw_uniforms
from strategies.secagg.ring import FixedPoint
from strategies.secagg.threshold import FEWEST_CLIENTS, needed

Kind = Literal["discrete_gaussian", "skellam"]

SPREAD = 5.0
"""Standard deviations of a value of the sum that fit into the ring on either side."""

BETA = math.exp(-0.5)
"""Share of roundings that may be refused for their norm. Kairouz 2021, section 6."""


@dataclass(frozen=True)
class GroupNoise:
    """What the groups of a run have in common: the sum of each has the same noise, whatever its size, if no more clients drop out than may.

    Attributes:
        noise_multiplier: as of `DistributedNoise`.
        value_bits: of a value of an update without noise (`strategies.secagg.ring.FixedPoint`).
        threshold: share of a group that has to stay.
    """

    kind: Kind
    clip_norm: float
    noise_multiplier: float
    value_bits: int
    threshold: float

    def possible(self, group_size: int, cohort: int, values: int) -> list[DistributedNoise]:
        """The noise of every size that a group may have in rounds of `cohort` clients at most, of at least `group_size` where there are as many.

        Raises:
            ValueError: as `DistributedNoise.in_group`.
        """
        largest = min(2 * group_size - 1, cohort)
        return [
            DistributedNoise.in_group(self, clients, values) for clients in range(FEWEST_CLIENTS, largest + 1)
        ]


@dataclass(frozen=True)
class DistributedNoise:
    """How the clients of a sum encode their updates. All of them, and who decodes, need the same.

    A client that drops out takes its share of the noise with it, so shares are so large that the fewest clients whose sum may be opened
    bring all of the noise. More clients bring more.

    Attributes:
        kind: distribution of the noise.
        values: length of an update.
        clip_norm: largest L2 norm of an update; a longer one is scaled down to it.
        noise_multiplier: standard deviation of the noise in a sum of the fewest clients, as a multiple of `clip_norm`.
        clients: the most clients of a sum.
        fewest: the fewest clients of a sum that is opened, those left out that are believed to collude with who opens it.
        bits: a value takes so many; fewer bits make the granularity coarser, and the norm that rounding may add larger.
    """

    kind: Kind
    values: int
    clip_norm: float
    noise_multiplier: float
    clients: int
    fewest: int
    bits: int = 20

    @staticmethod
    def in_group(group: GroupNoise, clients: int, values: int) -> DistributedNoise:
        """The noise of a group of so many clients, whose updates have so many values. It takes the ring of sums without noise.

        Raises:
            ValueError: the ring is too small for the noise, or has more than 28 bits.
        """
        bits = FixedPoint(clients, group.clip_norm, group.value_bits).ring.bits
        fewest = needed(group.threshold, clients)
        return DistributedNoise(
            group.kind, values, group.clip_norm, group.noise_multiplier, clients, fewest, bits
        )

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.clients:
            raise ValueError(f"the fewest clients are {self.fewest}, expected 1 to {self.clients}")
        if not (
            self.clip_norm > 0 and math.isfinite(self.clip_norm) and self.noise_multiplier > 0 and self.values
        ):
            raise ValueError(f"{self}: expected a clip norm, a noise multiplier and values above 0")
        if not 2 <= self.bits <= 28 or self.modulus <= 4 * SPREAD * math.sqrt(self.clients):
            raise ValueError(
                f"{self.bits} bits do not hold the rounding of {self.clients} clients, or are above 28"
            )

    @property
    def modulus(self) -> int:
        return int(2**self.bits)

    @cached_property
    def length(self) -> int:
        """Integers of an encoded update: `values`, filled up to a power of two, or to a multiple of the largest block."""
        if self.values >= rotation.LARGEST:
            return -(-self.values // rotation.LARGEST) * rotation.LARGEST
        return int(max(rotation.SMALLEST, 2 ** (self.values - 1).bit_length()))

    @cached_property
    def granularity(self) -> float:
        """What one integer step is worth: the smallest with which the sum fits into the ring, however alike the updates are.

        After the rotation a value of a sum has a deviation of at most clients · clip_norm / √block, besides those of rounding, of at most
        √clients / 2 steps, and of noise. Kairouz 2021, section 4.3.
        """
        alike = (self.clients * self.clip_norm) ** 2 / min(self.length, rotation.LARGEST)
        noise = (self.noise_multiplier * self.clip_norm) ** 2 * self.clients / self.fewest
        steps = (self.modulus / (2 * SPREAD)) ** 2 - self.clients / 4
        return math.sqrt((alike + noise) / steps)

    @cached_property
    def norm_bound(self) -> float:
        """Largest L2 norm of a rounded update, in steps: the L2 sensitivity of the sum. Kairouz 2021, Theorem 1."""
        norm, spread = self.clip_norm / self.granularity, math.sqrt(self.length)
        likely = norm**2 + self.length / 4 + math.sqrt(2 * math.log(1 / BETA)) * (norm + spread / 2)
        return min(math.sqrt(likely), norm + spread)

    @cached_property
    def local_variance(self) -> float:
        """Of the noise that one client adds, in steps²."""
        return (self.noise_multiplier * self.clip_norm / self.granularity) ** 2 / self.fewest

    def encode(self, update: npt.NDArray[np.floating], rotation_seed: int, source: Source) -> Words:
        """The residues, `length` integers from 0 to 2^bits - 1, that a client may put into a secure sum.

        Raises `ValueError` for another length of `update`, and for values that are not finite.
        """
        if len(update) != self.values or not np.isfinite(update).all():
            raise ValueError(f"an update has {self.values} finite values; this one has {len(update)}")
        noised = self._round(self._rotate(update, rotation_seed), source) + self._draw(source)
        return (noised % self.modulus).astype(np.uint64)

    def decode(self, residues: Words, rotation_seed: int) -> Floats:
        """The sum of the updates, with noise, from the sum of their residues modulo 2^bits."""
        numbers = residues.astype(np.int64)
        numbers -= self.modulus * (numbers >= self.modulus // 2)
        blocks = rotation.cut((numbers * self.granularity).astype(np.float32), self.length)
        return rotation.rotate_back(blocks, self.length, rotation_seed)[: self.values].astype(np.float64)

    def _rotate(self, update: npt.NDArray[np.floating], rotation_seed: int) -> Floats:
        """The clipped and rotated update, in steps."""
        padded = np.zeros(self.length, np.float64)
        padded[: self.values] = update
        norm = float(np.linalg.norm(padded))
        if norm > self.clip_norm:
            padded *= self.clip_norm / norm
        blocks = rotation.rotate((padded / self.granularity).astype(np.float32), rotation_seed)
        rotated = np.concatenate([block.reshape(-1) for block in blocks]).astype(np.float64)
        # The rotation is computed in float32, and may lengthen a vector by more than rounding may.
        longest = self.clip_norm / self.granularity
        if (norm := float(np.linalg.norm(rotated))) > longest:
            rotated *= longest / norm
        return rotated

    def _round(self, steps: Floats, source: Source) -> Integers:
        """Rounded up or down by chance, again and again until the norm is within its bound. Kairouz 2021, Algorithm 1."""
        whole = np.floor(steps)
        while True:
            rounded = whole + (draw_uniforms(source, len(steps)) < steps - whole)
            if float(np.square(rounded).sum()) <= self.norm_bound**2:
                return rounded.astype(np.int64)

    def _draw(self, source: Source) -> Integers:
        if self.kind == "skellam":
            return draw_skellam(source, self.local_variance, self.length)
        return draw_discrete_gaussian(source, math.sqrt(self.local_variance), self.length)
