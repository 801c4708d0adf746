"""The weighted mean against numpy's own average, which holds the whole cohort, and against reading memory."""

from __future__ import annotations

import numpy as np

from strategies.strategy import WeightedMean
from strategies.update import Update
from tests.bench.interleaved import medians

COHORT, VALUES, REPEATS = 32, 1_000_000, 5


def run() -> dict[str, float]:
    """Seconds for a cohort of 32 updates of a million values, and ratios."""
    rng = np.random.default_rng(0)
    updates = [
        Update({"w": rng.normal(size=VALUES).astype(np.float32)}, 10 + i, 1, 0.0) for i in range(COHORT)
    ]
    stacked = np.stack([update.delta["w"] for update in updates])
    weights = [update.num_examples for update in updates]

    def fold() -> None:
        mean = WeightedMean().start(COHORT)
        for position, update in enumerate(updates):
            mean.add(position, update)
        mean.finish()

    seconds = medians(
        {
            "fold": fold,
            "numpy.average": lambda: np.average(stacked, axis=0, weights=weights),
            "read once": stacked.sum,
        },
        REPEATS,
    )
    ratio = seconds["fold"] / seconds["numpy.average"]
    print(
        f"aggregation of {COHORT} x {VALUES:,}: fold {seconds['fold']:.3f} s, numpy.average {seconds['numpy.average']:.3f} s, ratio {ratio:.2f}; reading once {seconds['read once']:.3f} s"
    )
    return {**seconds, "fold / numpy.average": ratio}
