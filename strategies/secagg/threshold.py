"""How many clients a sum needs."""

from __future__ import annotations

import math

LEAST_THRESHOLD = 2 / 3
"""With two thirds a server that tells clients different things about a node gathers the shares of one secret at most, as long as fewer
than a third of the node's neighbours collude with it (Bonawitz 2017, section 6.2)."""

FEWEST_CLIENTS, MOST_CLIENTS = 3, 4096


def needed(threshold: float, parties: int) -> int:
    """How many of so many parties are a share of `threshold` at least."""
    return math.ceil(threshold * parties - 1e-9)
