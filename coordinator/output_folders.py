"""Folders that commands leave their results in."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from coordinator.errors import UserError


def default_folder(name: str) -> Path:
    """Folder of results for which no `--out` was given: `runs/<name>-<time>`."""
    return Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def require_new(out: Path) -> None:
    """Raises: UserError: `out` is neither new nor an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: the folder is not empty; name another one")
