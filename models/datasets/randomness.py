"""One seed, many independent streams."""

from __future__ import annotations

import numpy as np


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The generator of `seed` for one purpose; streams of different purposes share nothing.

    So drawing more numbers for one (a larger partition, say) never changes another (which rows are held out).
    `seed`: not negative.
    """
    return np.random.default_rng([seed, *purpose.encode()])
