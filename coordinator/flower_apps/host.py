"""The first process of an app's run: imports what the app needs once, then forks the ServerApp's process and the workers.

Started with the descriptor of a channel to the command, whose one frame says what to run.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.flower_apps import client, server
from coordinator.flower_apps.forks import fork_all
from edge_client.processes.channel import receive_frame
from edge_client.processes.process import die_with_parent

_SHARED = {
    "torch": r"^\s*(?:import|from)\s+torch\b",
    # An optimizer imports it at its first step: two seconds in each worker.
    "torch._dynamo": r"^\s*(?:import|from)\s+torch\b[^\0]*\boptim\b",
}
"""Modules that take long to import and start no thread, and what in an app's code shows that it will need them."""


def main() -> None:
    """Runs the app; ends as the process of its ServerApp ends."""
    die_with_parent()
    command = socket.socket(fileno=int(sys.argv[1]))
    job = receive_frame(command).values
    _import_shared(Path(job["folder"]), {job[key].partition(".")[0] for key in ("server", "client")})

    def run_server(forks: Any) -> None:
        server.serve(job, command, forks)

    def run_worker(channel: socket.socket) -> None:
        command.close()
        client.serve(job, channel)

    status = fork_all(run_server, run_worker)
    os._exit(status if status >= 0 else 128 - status)


def _import_shared(folder: Path, packages: Collection[str]) -> None:
    """Imports those of `_SHARED` that the app's code imports; the workers then have them in memory once."""
    files = [*folder.glob("*.py"), *(file for name in packages for file in (folder / name).rglob("*.py"))]
    sources = [file.read_text("utf-8", "replace") for file in files]
    for name, shows in _SHARED.items():
        if any(re.search(shows, source, re.MULTILINE) for source in sources):
            with suppress(ImportError):  # the app will say so itself
                importlib.import_module(name)


if __name__ == "__main__":
    main()
