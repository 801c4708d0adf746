"""The date: this machine's own, or the coordinator's once it was heard, for a device's own may be wrong by weeks."""

from __future__ import annotations

from collections.abc import Callable

CLOCK_TOLERANCE_SECONDS = 300.0
"""Beyond this the coordinator's clock is believed instead of this machine's."""


class Clock:
    """`now`: seconds, never jumps. `wall`: this machine's seconds since 1970."""

    def __init__(self, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self._now = now
        self._wall = wall
        self._heard: tuple[float, float] | None = None

    @property
    def heard(self) -> bool:
        """Whether somebody vouched for the date."""
        return self._heard is not None

    def hear(self, date: float) -> str | None:
        """Takes the coordinator's date over; what to tell the person where this machine's is another."""
        error = date - self._wall()
        self._heard = date, self._now()
        return clock_words(-error) if abs(error) > CLOCK_TOLERANCE_SECONDS else None

    def date(self) -> float:
        """Seconds since 1970: the coordinator's, carried on by the clock that never jumps, where this machine's differs much."""
        own = self._wall()
        if self._heard is None:
            return own
        date, heard_at = self._heard
        told = date + self._now() - heard_at
        return told if abs(told - own) > CLOCK_TOLERANCE_SECONDS else own


def clock_words(ahead_seconds: float) -> str:
    """What to tell about this machine's clock. Positive: it is ahead of the coordinator's."""
    size = abs(ahead_seconds)
    amount = f"{size / 3600:.0f} h" if size >= 5400 else f"{size / 60:.0f} min"
    side = "ahead of" if ahead_seconds > 0 else "behind"
    return f"this machine's clock is {amount} {side} the coordinator's; set it"
