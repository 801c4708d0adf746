"""Settings for all tests: Hypothesis watches no clock, temporary files are in memory, and the long files go first."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("no clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clocks")

_SHARED_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 4 * 2**30


def _temporary_files_in_memory() -> None:
    """Daemons and coordinators wait for the disk at every commit, milliseconds each, a hundred times a test.

    What they wait for matters when power fails. Tests kill processes, and a killed process loses nothing it wrote.
    A TMPDIR of one's own is respected, and so is a machine whose /dev/shm is small.
    """
    if "TMPDIR" in os.environ or not _SHARED_MEMORY.is_dir():
        return
    if shutil.disk_usage(_SHARED_MEMORY).free < _ROOM_BYTES:
        return
    folder = _SHARED_MEMORY / f"fedloop-tests-{os.geteuid()}"
    folder.mkdir(mode=0o711, exist_ok=True)  # PostgreSQL runs as somebody else and has to get through
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


_temporary_files_in_memory()

_LONG_FIRST = ("faults", "e2e", "models", "parity")
"""Folders whose files take longest. Each file goes to one worker as a whole (`--dist loadfile`)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
        return _LONG_FIRST.index(folder) if folder in _LONG_FIRST else len(_LONG_FIRST)

    items.sort(key=place)
