"""Folders that commands leave their results in."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from coordinator.errors import UserError


def default_folder(name: str) -> Path:
    """Folder of results for which no `--out` was given: `runs/<name>-<time>`."""
    return Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def require_new(out: Path, *, may_continue: bool = False, hint: str = "") -> None:
    """Requires a new or an empty folder; or, if it `may_continue`, any folder.

    Raises:
        UserError: `out` is something else; `hint` says what to do besides naming another one.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not may_continue)):
        raise UserError(f"--out {out}: the folder is not empty; name another one{hint}")
