"""Our own small programs in processes of their own: a runtime may end the process that runs a bad file in it.

They die with us, have one thread, and what they print is read as text.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

from edge_client.process import bound, worker_environment


def run(command: Sequence[str], seconds: float, but: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """What `command` came to. `but`: environment variables of ours that it does not have.

    Raises:
        TimeoutExpired: it took longer than that, and was killed.
    """
    environment = {name: value for name, value in worker_environment().items() if name not in but}
    return subprocess.run(
        bound(command), capture_output=True, text=True, errors="replace", timeout=seconds, env=environment
    )


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process that failed did so, in one line."""
    said = (done.stderr.strip().splitlines() or ["nothing"])[-1][:300]
    if done.returncode < 0:
        return f"it crashed ({signal.Signals(-done.returncode).name}): {said}"
    return f"it ended with status {done.returncode}: {said}"
