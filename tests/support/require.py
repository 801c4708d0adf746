"""What a machine may lack: a test that needs it is skipped by name, unless FEDLOOP_REQUIRE says it must be there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def require(what: str, reason: str) -> None:
    """Skips the calling test, or fails it where FEDLOOP_REQUIRE (names between commas) lists `what`."""
    if what in os.environ.get("FEDLOOP_REQUIRE", "").split(","):
        pytest.fail(f"{what} is required here: {reason}")
    pytest.skip(f"{what}: {reason}")


def data_dir(*names: str) -> Path:
    """The folder FEDLOOP_DATA_DIR, when it holds all of `names`; else the test is skipped or fails."""
    folder = os.environ.get("FEDLOOP_DATA_DIR")
    if not folder:
        require("data", "FEDLOOP_DATA_DIR is not set")
    assert folder is not None
    for name in names:
        if not (Path(folder) / name).is_file():
            require("data", f"{name} is not in FEDLOOP_DATA_DIR ({folder})")
    return Path(folder)


def compiler() -> None:
    """Requires a C++ compiler."""
    if shutil.which("g++") is None:
        require("compiler", "there is no g++")
