"""The long edition of tests/faults/test_kill_coordinator.py: every failpoint twice and ten kills at random, one chain."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from coordinator import failpoints
from tests.faults import test_kill_coordinator as killing

RANDOM_KILLS = 10


def run() -> dict[str, Any]:
    """Kills the coordinator of a run and its devices. Raises where something acknowledged is lost or the model is another."""
    points = [
        f"{name}:{count}"
        for name in failpoints.NAMES
        for count in ((1, 3) if name.startswith("intake") else (1, 2))
    ]
    requested = killing.experiment(len(points) + RANDOM_KILLS + 6)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, killing.federation(Path(folder), {}) as fleet:
        expected = killing.undisturbed(fleet, requested)
        killing.disturbed(fleet, expected, requested, points, RANDOM_KILLS)
    kills, seconds = len(points) + RANDOM_KILLS, time.monotonic() - began
    print(f"coordinator: {kills} SIGKILLs in {seconds:.0f} s, no acknowledged update lost, the same model")
    return {"kills": kills, "seconds": seconds, "rounds": requested.federation.rounds}
