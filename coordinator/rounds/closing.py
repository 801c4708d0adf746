"""When a round closes: one rule, which every fleet asks as updates arrive and time passes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Closing:
    """A round closes at `wanted` accepted updates or at its deadline; a fleet closes it earlier if no answer can come any more.

    Attributes:
        wanted: number of accepted updates that closes the round.
        deadline_seconds: on the fleet's clock, from the start of the round; an answer at this very moment still counts.
    """

    wanted: int
    deadline_seconds: float = 600.0

    def is_complete(self, accepted: int) -> bool:
        """Whether so many accepted updates close the round."""
        return accepted >= self.wanted

    def is_past(self, seconds: float) -> bool:
        """Whether the deadline has passed at this time; it closes the round, and an answer now comes too late."""
        return seconds > self.deadline_seconds
