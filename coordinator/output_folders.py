"""Folders that commands leave their results in: created, cleared, and locked while one process works in them."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path

from coordinator.errors import RunInterrupted, UserError
from edge_client.files import write_durably


def default_folder(name: str) -> Path:
    """Folder of results for which no `--out` was given: `runs/<name>-<time>`, and a number if that exists."""
    first = Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    more = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(folder for folder in chain([first], more) if not folder.exists())


def require_new(out: Path, *, may_continue: bool = False, hint: str = "") -> None:
    """Requires a new or an empty folder; or, if it `may_continue`, any folder.

    Raises:
        UserError: `out` is something else; `hint` says what to do besides naming another one.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not may_continue)):
        raise UserError(f"--out {out}: the folder is not empty; name another one{hint}")


def begin(out: Path, name: str, content: str) -> None:
    """Creates a folder unless it exists, and writes its first file. Raises: UserError: it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_durably(out / name, content.encode())
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None


@contextmanager
def undone_if_refused(out: Path, begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Leaves a new or empty folder as it was if the block raises `UserError`, and no folder above it that is new.

    The same command then works once its mistake is corrected. `begun`: whether there is work in it by now to keep.
    """
    missing = [each for each in (out, *out.parents) if not each.exists()]
    try:
        yield
    except UserError:
        if not begun():
            if out.is_dir():
                clear(out)
            with suppress(OSError):  # something else was put there meanwhile
                for folder in missing:
                    folder.rmdir()
        raise


def clear(folder: Path) -> None:
    """Removes everything in a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def locked(path: Path, taken: Exception) -> Iterator[None]:
    """Holds a lock file; raises `taken` if another process does. The kernel releases it when this process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken from None
        yield


@contextmanager
def resumable(how: str, *interruptions: type[Exception]) -> Iterator[None]:
    """Adds how to resume a run to what interrupts it from outside: Ctrl-C, the disk, or these errors."""
    errors: tuple[type[Exception], ...] = (OSError, *interruptions)
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterrupted(f"interrupted; {how}") from None
    except errors as error:
        between = "\n" if "\n" in str(error) else "; "
        interruption = RunInterrupted(f"{error}{between}{how}")
        if isinstance(error, RunInterrupted):
            interruption.exit_status = error.exit_status
        raise interruption from None
