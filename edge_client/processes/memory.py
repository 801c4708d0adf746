"""The memory that this machine, or the container that this process runs in, has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def total_bytes(groups: Path = _CGROUPS, root: Path = _ROOT) -> int:
    """Bytes that processes here can have: the machine's memory, or the least limit of the cgroups of this process.

    A limit that cannot be read does not count. `groups`: file with the cgroups of this process. `root`: where they are mounted.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(groups, root)])


def _limits(groups: Path, root: Path) -> Iterator[int]:
    try:
        lines = groups.read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = top / path.lstrip("/")
        # In a container the path may be the host's; what is mounted at the top is then the container's own cgroup.
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                yield from _read(folder / name)


def _read(file: Path) -> Iterator[int]:
    try:
        text = file.read_text("utf-8").strip()
    except OSError:
        return
    if text.isdecimal() and int(text) > 0:  # "max": no limit
        yield int(text)
