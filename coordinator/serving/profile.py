"""How long a batch takes by its size: what the scheduler plans with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

_WEIGHT, _OTHERS_WEIGHT = 0.1, 0.05
"""Of a new measurement in the running mean of its size, and of the others: what slows one down mostly slows all."""
_MOST_TIMES = 3.0
"""That one measurement may differ from the mean; what differs more counts as so much, so that no single stall decides."""
_MEAN_WEIGHT, _DEVIATION_WEIGHT, _DEVIATIONS = 0.125, 0.25, 4.0
"""Of a new lateness in its running mean and mean deviation, and how many deviations are left as a margin (Jacobson 1988, appendix A)."""


class Profile:
    """Seconds of a batch by its rows; between measured sizes on a straight line, above them in proportion.

    It starts from measurements and follows what the batches take.

    Attributes:
        margin: seconds that answers come after what was planned, nearly always at most: what a batch takes varies, and the event loop
            has other work.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if not seconds:
            raise ValueError("a profile needs at least one measured size")
        self._measured = dict(seconds)
        self._sizes = sorted(seconds)
        self._seconds: list[float] = []
        self._lateness = self._deviation = self.margin = 0.0
        self.forget()

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

    def rows_within(self, seconds: float, most: int) -> int:
        """The largest batch, of up to `most` rows, that takes no longer; 1 if none does."""
        if self.seconds(most) <= seconds:
            return most
        return max(bisect_right(range(1, most + 1), seconds, key=self.seconds), 1)

    def observe(self, rows: int, seconds: float) -> None:
        """A batch has taken so long: moves all sizes in its direction, most of all the nearest one that is not smaller."""
        at = min(bisect_left(self._sizes, rows), len(self._sizes) - 1)
        ratio = min(max(seconds / self.seconds(rows), 1 / _MOST_TIMES), _MOST_TIMES)
        for place in range(len(self._seconds)):
            self._seconds[place] *= 1 + (_WEIGHT if place == at else _OTHERS_WEIGHT) * (ratio - 1)

    def observe_lateness(self, seconds: float, rows: int) -> None:
        """The answers of a batch have come so long after, or if negative before, what was planned."""
        error = min(seconds, _MOST_TIMES * self.seconds(rows)) - self._lateness
        self._lateness += _MEAN_WEIGHT * error
        self._deviation += _DEVIATION_WEIGHT * (abs(error) - self._deviation)
        self.margin = max(self._lateness + _DEVIATIONS * self._deviation, 0.0)

    def forget(self) -> None:
        """Begins again with what was measured first."""
        self._seconds = [self._measured[size] for size in self._sizes]
        self._lateness = self._deviation = self.margin = 0.0

    def table(self) -> dict[int, float]:
        """Seconds by measured size."""
        return dict(zip(self._sizes, self._seconds, strict=True))
