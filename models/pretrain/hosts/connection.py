"""A member on a host, started through the remote shell: what it says arrives as events in a queue.

The remote shell's standard input carries commands to the member, its standard output the member's lines and the reports of
its processes, its standard error what they print. When it closes, the member ends (`models.pretrain.hosts.member`).
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from edge_client.processes import process
from models.pretrain.hosts.hostfile import HostsError

CLOSE_SECONDS = 5.0
"""How long a member may take to end once its input has closed."""


@dataclass(frozen=True)
class Event:
    """A line of a member, or with `line` None its end.

    Attributes:
        member: who says it, to tell it from another on the same host.
        status: exit status of the remote shell.
    """

    member: Member
    line: dict[str, Any] | None
    status: int = 0


class Member:
    """A member that was started on a host. `said`: the last line that it, or the remote shell, printed as an error."""

    def __init__(self, host: str, command: Sequence[str], events: queue.SimpleQueue[Event]) -> None:
        self.host, self.said = host, ""
        self._events = events
        program = shutil.which(command[0])
        if program is None:
            raise HostsError(f"{command[0]}, which starts processes on host {host}, is not on the PATH here")
        self._process = subprocess.Popen(
            process.tie_to_parent([program, *command[1:]]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=process.worker_environment(),
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._errors = threading.Thread(target=self._copy_errors, args=(self._process.stderr,), daemon=True)
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._errors.start()
        self._reader.start()

    def send(self, **line: Any) -> None:
        """Sends a line; nothing happens if the member is gone, whose end is an event."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the member and all its processes."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, stream: IO[bytes]) -> None:
        for text in stream:
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if isinstance(line, dict):
                self._events.put(Event(self, line))
            else:
                self._print(text)
        status = self._process.wait()
        self._errors.join(CLOSE_SECONDS)
        self._events.put(Event(self, None, status))

    def _copy_errors(self, stream: IO[bytes]) -> None:
        for text in stream:
            self._print(text)

    def _print(self, text: bytes) -> None:
        said = text.decode("utf-8", "replace").rstrip()
        self.said = said or self.said
        print(f"[{self.host}] {said}", file=sys.stderr, flush=True)  # noqa: T201 - our standard error is the log
