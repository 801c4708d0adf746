"""TOML files of the commands, and the paths that they name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from coordinator.errors import UserError

LIMIT_BYTES = 4 * 2**20
"""Largest file that is read."""


def beside(file: Path, path: str) -> str:
    """The absolute form of a path that `file` names: a relative one follows the file's folder.

    A file that is no regular one, such as the pipe of `<(…)`, has no folder of its own: the working directory counts.
    """
    is_stream = not file.is_file() or file.absolute().parent in (Path("/dev"), Path("/dev/fd"))
    return absolute(path if is_stream else str(file.parent.resolve() / _expanded(path)))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dicts."""
    try:
        with path.open("rb") as file:  # may be a pipe, <(…)
            content = file.read(LIMIT_BYTES + 1)
        if len(content) > LIMIT_BYTES:
            raise UserError(f"{path}: has more than {LIMIT_BYTES:,} bytes; expected an experiment in TOML")
        return parse_toml(content.decode("utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such experiment file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """TOML text as nested dicts."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source}: not valid TOML: {error}") from None


def absolute(path: str) -> str:
    """The absolute path; `~` is the user's home. Raises: UserError: `~name` is nobody's."""
    return str(_expanded(path).absolute())


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: has no home; write the path in full") from None
