"""Who shares masks with whom: a random regular graph of few neighbours for each client (Bell 2020, section 3).

The clients stand in a circle, in an order that the key list determines; each is joined with those next to it on both sides. So the
server cannot choose a client's neighbours, other than by leaving clients out of the key list.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from strategies.secagg.threshold import LEAST_THRESHOLD


class Graph:
    """Neighbours of clients 0 to clients - 1. `seed`: 32 bytes, the same for all parties."""

    def __init__(self, clients: int, degree: int, seed: bytes) -> None:
        self.clients = clients
        self._half = min(-(-degree // 2), clients // 2)
        self._complete = 2 * self._half >= clients - 1
        self._order = _random_order(clients, seed)
        self._places = np.empty(clients, np.int64)
        self._places[self._order] = np.arange(clients)

    @property
    def degree(self) -> int:
        """Neighbours of each client."""
        return self.clients - 1 if self._complete else 2 * self._half

    def neighbours(self, client: int) -> list[int]:
        """In increasing order, without the client itself."""
        if self._complete:
            return [other for other in range(self.clients) if other != client]
        offsets = np.arange(1, self._half + 1)
        places = self._places[client] + np.concatenate([-offsets, offsets])
        return sorted(self._order[places % self.clients].tolist())


def _random_order(clients: int, seed: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A permutation that is the same on every machine and under every version of NumPy."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(8 * clients))
    return np.argsort(np.frombuffer(stream, "<u8"), kind="stable")


def split_into_groups(clients: int, group_size: int) -> list[int]:
    """Sizes of the groups of a cohort: none smaller than `group_size`, unless the cohort is, and none as large as twice it."""
    groups = max(1, clients // group_size)
    smaller, larger = divmod(clients, groups)
    return [smaller + (number < larger) for number in range(groups)]


@lru_cache(maxsize=256)
def log_degree(
    clients: int,
    threshold: float = LEAST_THRESHOLD,
    *,
    colluding: float = 0.2,
    dropouts: float = 0.1,
    security_bits: int = 40,
    failure_bits: int = 20,
) -> int:
    """The smallest even degree that is secure and survives dropouts but for a negligible chance (Bell 2020, section 3.2).

    With `colluding` of the clients on the server's side and `dropouts` of them gone, none of these happens but with probability
    2**-security_bits: colluding neighbours reach the threshold of some client, or the honest clients left are not connected. And with
    2**-failure_bits at most, too few neighbours of some client stay.
    """
    bad, gone = math.floor(colluding * clients), math.floor(dropouts * clients)
    for degree in range(2, clients - 1, 2):
        needed = math.ceil(threshold * (degree + 1) - 1e-9)
        reached = clients * _tail(clients - 1, bad, degree, needed)
        missing = clients * _tail(clients - 1, gone, degree, degree + 2 - needed)
        # Both of two gaps of degree / 2 clients in the circle have to be removed.
        split = clients**2 * _all_removed(clients, bad + gone, degree)
        if max(reached, split) <= 2.0**-security_bits and missing <= 2.0**-failure_bits:
            return degree
    return clients - 1


def _tail(total: int, marked: int, drawn: int, least: int) -> float:
    """Chance of `least` marked ones or more among `drawn` of `total` (hypergeometric)."""
    hits = range(max(least, 0), min(drawn, marked) + 1)
    ways = sum(math.comb(marked, hit) * math.comb(total - marked, drawn - hit) for hit in hits)
    return ways / math.comb(total, drawn)


def _all_removed(total: int, removed: int, places: int) -> float:
    """Chance that so many given places are all among the removed ones."""
    return math.comb(removed, places) / math.comb(total, places)
