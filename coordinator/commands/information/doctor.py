"""`fedloop doctor`: what works on this machine, and how to fix what does not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from coordinator import extras, import_guard
from coordinator.commands.output import make_table
from coordinator.sandbox import enter

Level = Literal["ok", "note", "error"]

_FREE_BYTES = 500_000_000


@dataclass(frozen=True)
class Finding:
    """The result of one check; `message` says what was found and, unless ok, what to do."""

    subject: str
    level: Level
    message: str

    def to_json(self) -> dict[str, str]:
        """The document of `--json`, whose keys are stable."""
        return {"subject": self.subject, "level": self.level, "words": self.message}


def examine(data_dir: Path | None) -> list[Finding]:
    """Checks names, Python, runtimes, data and disk, without importing a framework."""
    return [*_names(), _python(), *_parts(), _data(data_dir), _sandbox(), _disk()]


def tabulate(findings: list[Finding]) -> Table:
    """The findings as a table."""
    table = make_table("", "checked", "found")
    styles = {"ok": "green", "note": "yellow", "error": "bold red"}
    for finding in findings:
        level = Text(finding.level, style=styles[finding.level])
        table.add_row(level, finding.subject, Text(finding.message))
    return table


def _names() -> Iterator[Finding]:
    problems = import_guard.problems()
    if not problems:
        yield Finding("top-level names", "ok", f"{', '.join(import_guard.NAMES)} are ours alone")
    for problem in problems:
        yield Finding("top-level names", "error", problem)


def _python() -> Finding:
    version = f"{platform.python_version()} at {sys.executable}"
    if platform.python_version_tuple()[:2] == ("3", "11"):
        return Finding("Python", "ok", version)
    return Finding("Python", "error", f"{version}; fedloop runs on Python 3.11")


def _parts() -> Iterator[Finding]:
    for part, (needs, _) in extras.PARTS.items():
        lacking = extras.missing(part)
        if lacking:
            message = f"{', '.join(lacking)} not installed; {extras.how_to_install(part)}"
            yield Finding(part, "note", message)
        else:
            yield Finding(part, "ok", ", ".join(f"{need} {extras.installed_version(need)}" for need in needs))


def _data(data_dir: Path | None) -> Finding:
    if data_dir is None:
        return Finding(
            "data files", "note", "neither --data-dir nor FEDLOOP_DATA_DIR is set; digits works without"
        )
    if not data_dir.is_dir():
        return Finding(
            "data files",
            "error",
            f"{data_dir} is not a folder; set FEDLOOP_DATA_DIR to the one with the files",
        )
    return Finding("data files", "ok", f"looked for in {data_dir}")


def _sandbox() -> Finding:
    if reason := enter.unavailable_reason():
        message = (
            f"{reason}; `fedloop serve` runs its workers unconfined, and --allow-code needs --no-sandbox"
        )
        return Finding("sandbox", "note", message)
    return Finding(
        "sandbox", "ok", f"Landlock {enter.landlock_version()}, for the workers of `fedloop serve`"
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    cores = len(os.sched_getaffinity(0))
    message = f"{free / 1e9:.1f} GB free here, {cores} cores"
    return Finding("machine", "ok" if free > _FREE_BYTES else "note", message)
