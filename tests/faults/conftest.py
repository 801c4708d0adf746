"""Every coordinator here is served on SQLite and on PostgreSQL; most tests on the second in `make test-long` only."""

from __future__ import annotations

from tests.support.databases import database, database_url, module_served_on, served_on
from tests.support.portal import one_event_loop

__all__ = ["database", "database_url", "module_served_on", "one_event_loop", "served_on"]
