"""The trace of a run in its folder, written from its events."""

from __future__ import annotations

from pathlib import Path

from coordinator.fleets.trace_file import format_trace
from coordinator.reports.folder_state import iterate_events
from edge_client.files import write_durably


def write_trace(out: Path, name: str | None) -> None:
    """Writes the trace of the run in `out` if it recorded one."""
    if name is not None:
        write_durably(out / name, format_trace(iterate_events(out)).encode())
