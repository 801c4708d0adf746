"""500 devices that upload 4 MB each in the same moment: the coordinator's memory, and what an honest check-in waits."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.arena import arena
from tests.support.upload_storm import Storm, storm

UPLOADS = 500
SECONDS = 120.0
MAX_GROWTH_BYTES = 32_000_000
MAX_P99_SECONDS = 0.2


def run(uploads: int = UPLOADS) -> dict[str, Any]:
    """Figures of devices that have just connected, and of devices that were connected; `failures`: what does not hold.

    What a check-in waits while all of a connected fleet sends in the same instant is a figure without a bound: the sender is
    another process on the same cores, and one turn of the event loop serves every socket that is ready.
    """
    new, kept = _storm(uploads, kept=False), _storm(uploads, kept=True)
    failures = [f"new: {what}" for what in (*_too_much(new), *_too_late(new))]
    failures += [f"kept: {what}" for what in _too_much(kept)]
    return {"new": _figures(new), "kept": _figures(kept), "uploads": uploads, "failures": failures}


def _storm(uploads: int, *, kept: bool) -> Storm:
    with tempfile.TemporaryDirectory() as folder, arena(Path(folder)) as made:
        honest, *uploaders = made.enrol(uploads + 1)
        found = storm(made, uploaders, honest, SECONDS, kept=kept)
        broken = [line for line in made.failures() if '"status": 503' not in line]
        assert not broken, broken[:5]
    return found


def _too_much(found: Storm) -> list[str]:
    if found.growth_bytes <= MAX_GROWTH_BYTES:
        return []
    return [f"memory grew by {found.growth_bytes / 1e6:.0f} MB"]


def _too_late(found: Storm) -> list[str]:
    if found.honest_p99() <= MAX_P99_SECONDS:
        return []
    return [f"an honest check-in took {found.honest_p99() * 1e3:.0f} ms (p99)"]


def _figures(found: Storm) -> dict[str, Any]:
    return {
        "seconds": found.seconds,
        "megabytes_at_rest": found.rest_bytes / 1e6,
        "megabytes_growth": found.growth_bytes / 1e6,
        "honest_p99_ms": found.honest_p99() * 1e3,
        "honest_check_ins": len(found.honest),
        "uploaded_megabytes": found.accepted_bytes / 1e6,
        "statuses": dict(found.statuses),
        "codes": dict(found.codes),
    }


if __name__ == "__main__":
    for key, value in run(*map(int, sys.argv[1:])).items():
        sys.stdout.write(f"{key:24}{value}\n")
