"""Whether work in hand is to go on: asked twice a second by whoever does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from edge_client.surroundings import Surroundings

LOOK_SECONDS = 5.0
"""How often conditions are read again meanwhile."""

Cause = Literal["ending", "paused", "unwanted", "ineligible", "opted_out", "deadline"]


class Watch:
    """Asked by the training process whether to go on; remembers why not."""

    def __init__(self, around: Surroundings, why_not: Callable[[bool], tuple[Cause, str] | None]) -> None:
        """`why_not`: why the work is to stop now, or None; reads conditions only where it is given True."""
        self._around = around
        self._why_not = why_not
        self._look_at = around.now() + LOOK_SECONDS
        self.cause: Cause | None = None

    def __call__(self) -> str | None:
        around = self._around
        around.notify("WATCHDOG=1")
        look = around.now() >= self._look_at
        if look:
            self._look_at = around.now() + LOOK_SECONDS
        reason = self._why_not(look)
        if reason is None:
            return None
        self.cause, words = reason
        return words
