"""Stalls: a run whose disk or database fails temporarily reports the reason once and waits.

Waiting loses nothing: committed rounds are durable, and the open round continues with the updates it has. The report says
where and why the run stalled and what to do. It goes to the log immediately, and to the run's events once the database is
writable. The run continues by itself.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import structlog
from sqlalchemy.exc import SQLAlchemyError

from coordinator.db import events
from coordinator.storage.errors import describe

if TYPE_CHECKING:
    from coordinator.context.services import Services

_log = structlog.get_logger("fedloop.runs")


class StallLog:
    """Stalls of one run. Only the run's thread may call it."""

    def __init__(self, services: Services, run: str) -> None:
        self._services = services
        self._run = run
        self._reason = ""
        self._since: datetime = services.clock()
        self._is_recorded = True

    def report(self, error: BaseException) -> None:
        """Reports the reason of a stall unless it is the one reported last. `is_temporary(error)` must hold."""
        reason = describe(error, self._services.settings.home)
        if reason != self._reason:
            self._reason, self._since, self._is_recorded = reason, self._services.clock(), False
            _log.error("run_stalled", run=self._run, reason=reason)
        self.flush()

    def clear(self) -> None:
        """Ends the stall: the next failure is reported again."""
        self.flush()
        self._reason = ""

    def flush(self) -> None:
        """Writes the pending event, if there is one, and waits for the write."""
        if self._is_recorded:
            return
        since, run, reason = self._since, self._run, self._reason
        try:
            self._services.database.write(
                lambda connection: events.record(connection, since, "run_stalled", run=run, reason=reason)
            ).result()
        except (SQLAlchemyError, RuntimeError):
            return  # the database still fails, or (RuntimeError) the process is ending
        self._is_recorded = True
        self._services.signals.notify("events")
