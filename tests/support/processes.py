"""Processes that bear a mark: an environment variable, which all their children inherit.

So none can hide from a test, whatever session or parent it has.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HANGS_SECONDS = 300
"""What takes longer is broken; nothing waits for as long as this otherwise."""

_PROC = Path("/proc")


@dataclass(frozen=True)
class Marked:
    """All living processes in whose environment `variable` has this value."""

    variable: str
    value: str

    @property
    def environment(self) -> dict[str, str]:
        """What to start the first of them with."""
        return {self.variable: self.value}

    def alive(self) -> list[str]:
        """Their command lines."""
        return [words for _, words in self._living()]

    def pids_of(self, message: str) -> list[int]:
        """Those with `words` in their command lines, the oldest first."""
        return sorted(pid for pid, line in self._living() if message in line)

    def all_gone(self) -> bool:
        """Waits until none is left; False where one stays for good."""
        for pid, _ in self._living():
            try:
                with pidfd(pid) as ended:
                    if not ended.poll(HANGS_SECONDS * 1000):
                        return False
            except ProcessLookupError:
                continue
        return not self._living()

    def _living(self) -> list[tuple[int, str]]:
        # What has ended but was not yet waited for has an empty environment here.
        return [
            (pid, read_proc(pid, "cmdline").replace("\0", " "))
            for pid in pids()
            if f"\0{self.variable}={self.value}\0" in "\0" + read_proc(pid, "environ")
        ]


@contextmanager
def pidfd(pid: int) -> Iterator[select.poll]:
    """A poll object that reports when the process has ended. Raises ProcessLookupError where there is none."""
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        yield poll
    finally:
        os.close(handle)


def pids() -> list[int]:
    """Of all processes of this machine."""
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdecimal()]


def read_proc(pid: int, name: str) -> str:
    """A file of the process; empty where it ended meanwhile, or is another user's."""
    try:
        return (_PROC / str(pid) / name).read_text("utf-8", "replace")
    except OSError:
        return ""
