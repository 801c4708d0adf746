"""The date: the coordinator's once it is known, because a device's own clock may be wrong by weeks."""

from __future__ import annotations

from collections.abc import Callable

CLOCK_TOLERANCE_SECONDS = 300.0
"""If the clocks differ by more, the coordinator's is used."""


class Clock:
    """`now`: monotonic seconds. `wall`: this machine's seconds since 1970."""

    def __init__(self, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self._now = now
        self._wall = wall
        self._reference: tuple[float, float] | None = None

    @property
    def is_synchronized(self) -> bool:
        """Whether the coordinator's date is known."""
        return self._reference is not None

    def update(self, date: float) -> str | None:
        """Takes the coordinator's date. Returns a warning if this machine's clock differs."""
        error = date - self._wall()
        self._reference = date, self._now()
        return describe_clock_error(-error) if abs(error) > CLOCK_TOLERANCE_SECONDS else None

    def date(self) -> float:
        """Seconds since 1970: if this machine's clock is far off, the coordinator's, continued by the monotonic clock."""
        own = self._wall()
        if self._reference is None:
            return own
        date, received_at = self._reference
        estimate = date + self._now() - received_at
        return estimate if abs(estimate - own) > CLOCK_TOLERANCE_SECONDS else own


def describe_clock_error(ahead_seconds: float) -> str:
    """A message about this machine's clock. Positive: it is ahead of the coordinator's."""
    size = abs(ahead_seconds)
    amount = f"{size / 3600:.0f} h" if size >= 5400 else f"{size / 60:.0f} min"
    side = "ahead of" if ahead_seconds > 0 else "behind"
    return f"this machine's clock is {amount} {side} the coordinator's; set it"
