"""Shamir's secret sharing of 32 bytes over a prime field: any `needed` shares give the secret, fewer tell nothing (Shamir 1979).

A secret is one element of the field, since the prime is just above 2^256.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33


class BadShare(ValueError):
    """Bytes that are no element of the field, or shares that give no secret."""


def split(
    secret: bytes, needed: int, points: Sequence[int], random_bytes: Callable[[int], bytes]
) -> list[bytes]:
    """One share for each of the `points`, different numbers above 0, of a secret of 32 bytes."""
    if len(secret) != SECRET_BYTES or not 1 <= needed <= len(points):
        raise ValueError(f"{len(secret)} bytes, {needed} of {len(points)} shares")
    drawn = random_bytes(
        48 * (needed - 1)
    )  # 128 bits more than the prime, so that remainders are as good as uniform
    coefficients = [
        int.from_bytes(drawn[start : start + 48], "little") % PRIME for start in range(0, len(drawn), 48)
    ]
    constant = int.from_bytes(secret, "little")
    return [_evaluate(coefficients, constant, point).to_bytes(SHARE_BYTES, "little") for point in points]


def combine(shares: Sequence[bytes], points: Sequence[int]) -> bytes:
    """The secret, from as many shares as are needed. Raises BadShare."""
    numbers = [int.from_bytes(share, "little") for share in shares]
    if any(len(share) != SHARE_BYTES for share in shares) or any(number >= PRIME for number in numbers):
        raise BadShare("a share is no element of the field")
    weights = _weights_at_zero(tuple(points))
    secret = sum(weight * number for weight, number in zip(weights, numbers, strict=True)) % PRIME
    if secret >= 2**256:
        raise BadShare("the shares give no secret of 32 bytes")
    return secret.to_bytes(SECRET_BYTES, "little")


def _evaluate(coefficients: Sequence[int], constant: int, point: int) -> int:
    value = 0
    for coefficient in coefficients:
        value = (value + coefficient) * point % PRIME
    return (value + constant) % PRIME


@lru_cache(maxsize=4096)
def _weights_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights of the values at these points in the value at 0."""
    weights = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
