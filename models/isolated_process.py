"""Runs small programs of ours in separate processes, because a bad file may crash the runtime that opens it.

They die with this process, have one thread, and their output is read as text.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

from edge_client.processes.process import tie_to_parent, worker_environment


def run(
    command: Sequence[str], seconds: float, without: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs `command` to its end. `without`: environment variables that it does not inherit.

    Raises:
        TimeoutExpired: it took longer than `seconds` and was killed.
    """
    environment = {name: value for name, value in worker_environment().items() if name not in without}
    return subprocess.run(
        tie_to_parent(command),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        env=environment,
    )


def failure_reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process failed, in one line."""
    message = (done.stderr.strip().splitlines() or ["nothing"])[-1][:300]
    if done.returncode < 0:
        return f"it crashed ({signal.Signals(-done.returncode).name}): {message}"
    return f"it ended with status {done.returncode}: {message}"
