"""A file system of limited size, and what fills it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.require import require


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mounts a file system of this size at `folder`; the test is skipped where that is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        require("mount", f"a file system cannot be mounted: {reason}")
    try:
        yield folder
    finally:
        # Lazily: a process that was just killed may not have let go yet.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """A file system of `small_disk` takes no writes while the block runs, as one that met an error of its disk."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@contextmanager
def mounted(disk: Path, folder: Path) -> Iterator[None]:
    """What is on `disk` is at `folder` too."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", str(disk), str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def unmounted(disk: Path, folder: Path) -> Iterator[None]:
    """Nothing of it is at `folder`, which `mounted` made, while the block runs."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "--bind", str(disk), str(folder)], check=True)


def fill(file: Path, *, leave_bytes: int = 0) -> None:
    """Takes all the space of the file's disk but `leave_bytes`."""
    with file.open("wb", buffering=0) as target, suppress(OSError):
        while (room := free_bytes(file.parent) - leave_bytes) > 0:
            target.write(bytes(min(room, 65_536)))


def free_bytes(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize
