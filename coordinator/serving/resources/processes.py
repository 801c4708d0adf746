"""Memory and CPU time of processes of this machine, as the kernel counts them (`man 5 proc`)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_KIB = 1024


class Memory(NamedTuple):
    """Of a process, in bytes.

    `pss`: its own, and its share of what it has in common with others; sums over processes count everything once.
    `own`: what would be free without it.
    """

    pss: int = 0
    own: int = 0


def memory_of(pid: int) -> Memory:
    """The memory of a process; zeros if it has ended. Takes a millisecond or so for a large one."""
    found = {"Pss": 0, "Private_Clean": 0, "Private_Dirty": 0, "Private_Hugetlb": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key in found:
                found[key] = int(rest.split()[0]) * _KIB
    pss = found.pop("Pss")
    return Memory(pss, sum(found.values()))


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    below: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            below += [int(each) for each in path.read_text().split()]
    return [pid, *(each for child in below for each in tree(child))]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all below it, and of the children that they have reaped."""
    return sum(map(_cpu_seconds, tree(pid)))


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
