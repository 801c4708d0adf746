"""Asks during long work, twice a second, whether it must stop, and remembers why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from edge_client.daemon.host_environment import HostEnvironment

CONDITIONS_SECONDS = 5.0
"""How often conditions are read again during the work."""

Cause = Literal["ending", "paused", "unwanted", "ineligible", "opted_out", "deadline"]


class Cancellation:
    """Called by the training process; returns the reason to stop, or None. `cause`: the reason's kind."""

    def __init__(
        self, host: HostEnvironment, stop_reason: Callable[[bool], tuple[Cause, str] | None]
    ) -> None:
        """`stop_reason`: why the work must stop now, or None; reads conditions only if called with True."""
        self._host = host
        self._stop_reason = stop_reason
        self._read_conditions_at = host.now() + CONDITIONS_SECONDS
        self.cause: Cause | None = None

    def __call__(self) -> str | None:
        self._host.notify("WATCHDOG=1")
        read_conditions = self._host.now() >= self._read_conditions_at
        if read_conditions:
            self._read_conditions_at = self._host.now() + CONDITIONS_SECONDS
        reason = self._stop_reason(read_conditions)
        if reason is None:
            return None
        self.cause, message = reason
        return message
