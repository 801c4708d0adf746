"""Settings for all tests: Hypothesis watches no clock, and the long files go first, so that no core idles at the end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("no clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clocks")

_LONG_FIRST = ("faults", "e2e", "models", "parity")
"""Folders whose files take longest. Each file goes to one worker as a whole (`--dist loadfile`)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
        return _LONG_FIRST.index(folder) if folder in _LONG_FIRST else len(_LONG_FIRST)

    items.sort(key=place)
