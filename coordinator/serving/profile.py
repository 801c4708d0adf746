"""How long a batch takes by its size: what the scheduler plans with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

_WEIGHT = 0.1
"""Of a new measurement in the running mean of its size."""


class Profile:
    """Seconds of a batch by its rows; between measured sizes on a straight line, above them in proportion.

    It starts from measurements and follows what the batches take.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if not seconds:
            raise ValueError("a profile needs at least one measured size")
        self._sizes = sorted(seconds)
        self._seconds = [seconds[size] for size in self._sizes]

    def seconds(self, rows: int) -> float:
        """Of a batch of that many rows."""
        sizes, seconds = self._sizes, self._seconds
        at = bisect_left(sizes, rows)
        if at == len(sizes):
            return seconds[-1] * rows / sizes[-1]
        if sizes[at] == rows or not at:
            return seconds[at]
        share = (rows - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def observe(self, rows: int, seconds: float) -> None:
        """A batch has taken so long: moves the nearest measured size that is not smaller in its direction."""
        at = min(bisect_left(self._sizes, rows), len(self._sizes) - 1)
        ratio = seconds / self.seconds(rows)
        self._seconds[at] *= 1 + _WEIGHT * (ratio - 1)

    def table(self) -> dict[int, float]:
        """Seconds by measured size."""
        return dict(zip(self._sizes, self._seconds, strict=True))
