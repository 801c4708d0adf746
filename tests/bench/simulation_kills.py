"""The long edition of tests/faults/test_kill.py: runs of both kinds, each killed at twelve moments and resumed every time."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults import test_kill as killing

KILLS_IN_ROUNDS = 8


def run() -> dict[str, Any]:
    """Raises where a killed run does not end in the model of an undisturbed one."""
    began, kills = time.monotonic(), 0
    for workers, settings in ((1, killing.MIXED), (2, killing.TORCH)):
        with tempfile.TemporaryDirectory() as folder:
            kills += killing.killed_anywhere(Path(folder), workers, settings, 11 + workers, KILLS_IN_ROUNDS)
    seconds = time.monotonic() - began
    print(f"simulation: {kills} SIGKILLs in {seconds:.0f} s, the models of undisturbed runs")
    return {"kills": kills, "seconds": seconds}
