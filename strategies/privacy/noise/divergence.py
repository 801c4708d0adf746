"""Rényi divergences of distributed noise: how well a sum of encoded updates hides whether one client is in it.

Adjacent are sums with a client's integers and with zeros in their place; its noise is not counted on, see `DistributedNoise.fewest`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from strategies.privacy.noise.secure import Floats

if TYPE_CHECKING:
    from strategies.privacy.noise.distributed import DistributedNoise


def divergences(noise: DistributedNoise, orders: Sequence[int]) -> Floats:
    """The Rényi divergence of one sum at each order, an integer above 1."""
    if noise.kind == "skellam":
        return skellam(noise.norm_bound, noise.length, noise.local_variance * noise.fewest, orders)
    return discrete_gaussians(noise.norm_bound, noise.length, noise.local_variance, noise.fewest, orders)


def skellam(norm: float, values: int, variance: float, orders: Sequence[int]) -> Floats:
    """Skellam noise of a variance on integers that one client changes by at most `norm` in L2. Agarwal 2021, Theorem 3.5.

    The L1 norm of integers is at most their squared L2 norm, and √values times that norm.
    """
    alpha = np.asarray(orders, np.float64)
    absolute = min(norm**2, math.sqrt(values) * norm)
    squares = ((2 * alpha - 1) * norm**2 + 6 * absolute) / (4 * variance**2)
    return np.asarray(alpha * norm**2 / (2 * variance) + np.minimum(squares, 3 * absolute / (2 * variance)))


def discrete_gaussians(
    norm: float, values: int, variance: float, clients: int, orders: Sequence[int]
) -> Floats:
    """The sum of the discrete Gaussians of `clients`, each of `variance`. Kairouz 2021, Theorem 1.

    A sum of discrete Gaussians is not one, but almost: τ bounds how far they are apart.
    """
    k = np.arange(1, clients)
    tau = 10 * float(np.exp(-2 * math.pi**2 * variance * k / (k + 1)).sum())
    shift = norm / math.sqrt(clients * variance)
    epsilon = min(math.sqrt(shift**2 + tau * values / 2), shift + tau * math.sqrt(values))
    return np.asarray(np.asarray(orders, np.float64) * epsilon**2 / 2)
