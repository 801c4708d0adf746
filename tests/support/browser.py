"""Chromium on the console that `make web` built, driven by a script of `web/e2e` in Node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.server.console import BUILT
from tests.support.require import require

WEB = Path(__file__).parents[2] / "web"
_NODE = Path(sys.executable).parent / "node"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """The path of a Chromium. Skips the test without one, or without the built console."""
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None or not (BUILT / "index.html").is_file() or not (WEB / "node_modules").is_dir():
        require("chromium", "no Chromium is installed, or `make web` did not build the console")
    assert found is not None
    return found


@contextmanager
def running(script: str, requested: Mapping[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A script of `web/e2e`, told what is `asked` in `CONSOLE_TEST`; what it says comes from its standard output."""
    environment = {**os.environ, "CONSOLE_TEST": json.dumps({**requested, "chromium": find_browser()})}
    command = [str(_NODE), str(WEB / "e2e" / script)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process
