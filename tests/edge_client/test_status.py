"""The log of the daemon in the foreground."""

from __future__ import annotations

from pathlib import Path

from edge_client.daemon.status import Writer


def test_the_log_shows_each_change_once(tmp_path: Path) -> None:
    lines: list[str] = []
    writer = Writer(tmp_path, lambda: 0.0, lambda message: None, lines.append)
    for seconds in (10, 20):
        writer.write("holding", "waits for a task")
        writer.write("idle", f"no work now; checks in again in {seconds} s")
    writer.write("training", "digits, round 1, torch")
    writer.write("training", "digits, round 1, torch")
    writer.note("digits, round 1: accepted")
    writer.note("digits, round 1: accepted")
    writer.write("idle", "no work now\x1b[2J")
    assert [line.split(" ", 2)[2] for line in lines] == [
        "holding: waits for a task",
        "training: digits, round 1, torch",
        "digits, round 1: accepted",
        "idle: no work now [2J",
    ]
    assert all(line.startswith(("1969", "1970")) for line in lines)
