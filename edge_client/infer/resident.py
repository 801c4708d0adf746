"""Resident memory of this process, from proc(5)."""

from __future__ import annotations

import re
from pathlib import Path

_SELF = Path("/proc/self")


def resident_bytes() -> int:
    """Resident bytes now; resets the peak."""
    (_SELF / "clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """Peak resident bytes since the last call of `resident_bytes`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {key}"
    return int(found[1]) * 1024
