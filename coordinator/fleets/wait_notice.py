"""The notice of a round that waits for devices, as an event and a line in the log."""

from __future__ import annotations

from typing import Any

import structlog
from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.db import events, participants
from coordinator.fleets.run_session import LONGEST_WAIT_SECONDS
from coordinator.scheduling.deployments import Deployment

_log = structlog.get_logger("fedloop.runs")


class WaitNotice:
    """Decides when to record the notice: immediately, and when the number of devices changes, some seconds apart."""

    def __init__(self, services: Services, deployment: Deployment, number: int, wanted: int) -> None:
        self._services = services
        self._deployment = deployment
        self._number = number
        self._wanted = wanted
        self._last: tuple[int, float] | None = None

    def is_due(self, eligible: int, moment: float) -> bool:
        """Whether to record this number of devices now; if so, it counts as recorded."""
        if self._last is not None:
            before, since = self._last
            if eligible == before or moment - since < LONGEST_WAIT_SECONDS:
                return False
        self._last = (eligible, moment)
        return True

    def record(self, connection: Connection, seconds: float) -> None:
        """Writes the event and the line in the log."""
        assert self._last is not None
        values: dict[str, Any] = {
            "round": self._number,
            "eligible": self._last[0],
            "wanted": self._wanted,
            "least": self._deployment.quorum,
            "enrolled": participants.fleet_size(connection),
            "seconds": round(seconds),
        }
        run = self._deployment.run
        events.record(connection, self._services.clock(), "round_waiting", run=run, **values)
        _log.info("round_waiting", run=run, **values)
