"""Fixtures of the coordinator's tests."""

from __future__ import annotations

from tests.support.databases import database, database_url

__all__ = ["database", "database_url"]
