"""Settings for all tests: Hypothesis watches no clock, temporary files are in memory, and the long files go first."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
import typer.main
import typer.testing
import uvicorn.server
from hypothesis import HealthCheck, settings

from tests.support.long import LONG
from tests.support.preloaded_workers import preloaded_workers

__all__ = ["preloaded_workers"]

settings.register_profile(
    "no clocks",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=100 if LONG else 40,
)
settings.register_profile("quick", settings.get_profile("no clocks"), max_examples=25)  # `make check`
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


@pytest.fixture(autouse=True)
def log_settings_left_as_found() -> Iterator[None]:
    """A test that configures a whole process's log does not leave it so for the tests after it in the same worker."""
    root, settings_before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    if root.level != level:  # which goes through all loggers of all frameworks
        root.setLevel(level)
    structlog.configure(**settings_before)


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """Typer builds click's tree of all commands at each call of a `Typer`: a tenth of a second. A process calls it once, tests often."""
    build = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", build)
        patch.setattr(typer.testing, "_get_command", build)
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_in_this_process_end_at_once() -> Iterator[None]:
    """uvicorn looks ten times a second whether to end, and whether connections are closed: a third of a second for each server."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.02))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make check` does not import a module whose tests are all slow: some import a framework, which takes seconds."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return _ALL_SLOW.search(collection_path.read_text("utf-8")) is not None or None


_ALL_SLOW = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)


def pytest_collection_finish() -> None:
    """Millions of objects of the frameworks that tests import need not be searched for garbage again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frameworks_imported_by_a_module_are_frozen_too() -> Iterator[None]:
    yield
    gc.collect()
    gc.freeze()


_LONGEST = (
    "e2e/test_console.py",
    "faults/test_kill_coordinator.py",
    "e2e/test_schema.py",
    "faults/test_hostile_devices.py",
    "e2e/test_simulate.py",
    "parity/test_litert_training.py",
    "e2e/test_statistics.py",
    "faults/test_kill_daemon.py",
    "e2e/test_demo_loop.py",
    "e2e/test_sweep.py",
    "e2e/test_regression.py",
    "coordinator/test_own_strategy.py",
    "e2e/test_docs.py",
    "models/test_export_inference.py",
    "faults/test_kill.py",
    "faults/test_pretrain_kill.py",
    "e2e/test_reach.py",
    "coordinator/test_runs.py",
    "e2e/test_demo.py",
    "e2e/test_own_model_on_devices.py",
    "e2e/test_pretrain.py",
    "parity/test_images_and_texts.py",
    "models/test_export_keras.py",
    "e2e/test_compress.py",
)
"""Files that take longest, the longest first. Each goes to one worker as a whole (`--dist loadfile`), and none may be left for the end."""

_LONG_FIRST = ("faults", "e2e", "models", "parity")
"""Folders whose files take longest after those."""


_ON_POSTGRESQL = {
    "test_audit_chain",
    "test_enrolment",
    "test_migrations",
    "test_store",
    "test_uploads",
}
"""Modules whose tests run on PostgreSQL in `make test` too: what the two databases do differently is in them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places: dict[Path, int] = {}

    def place(item: pytest.Item) -> int:
        if item.path not in places:
            places[item.path] = _place(item.path.relative_to(item.config.rootpath / "tests"))
        return places[item.path]

    for item in items:
        if _on_postgresql(item) and item.path.stem not in _ON_POSTGRESQL:
            item.add_marker("extended")
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("long")  # with more examples
    if not LONG:
        left = [item for item in items if _is_extended(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not _is_extended(item)]
    items.sort(key=place)


def _place(file: Path) -> int:
    if file.as_posix() in _LONGEST:
        return _LONGEST.index(file.as_posix())
    folder = file.parts[0]
    return len(_LONGEST) + (_LONG_FIRST.index(folder) if folder in _LONG_FIRST else len(_LONG_FIRST))


def _is_extended(item: pytest.Item) -> bool:
    return item.get_closest_marker("extended") is not None


def _on_postgresql(item: pytest.Item) -> bool:
    parameters = getattr(item, "callspec", None)
    return parameters is not None and any(
        isinstance(value, str) and value == "postgresql" for value in parameters.params.values()
    )
