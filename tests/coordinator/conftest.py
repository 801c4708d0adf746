"""Fixtures of the coordinator's tests, and tracebacks as a coordinator logs them."""

from __future__ import annotations

import structlog

from tests.support.databases import database, database_url
from tests.support.portal import one_event_loop

__all__ = ["database", "database_url", "one_event_loop"]

# As in coordinator.server.logs: structlog's own default shows the values of all variables, which takes it seconds.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)
