"""Events of a run: one JSON object per line."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coordinator import json_values

Clock = Callable[[], datetime]


class Emit(Protocol):
    """Records one event with its keys, such as `emit("update_rejected", round=3, client="a", reason="stale_base")`."""

    def __call__(self, event: str, **values: Any) -> None: ...


def emit_each(emit: Emit, event: str, shared: Mapping[str, Any], **columns: Sequence[Any]) -> None:
    """Emits an event for each line of the columns. `shared`: keys that all of them have."""
    if isinstance(emit, EventLog):
        emit.each(event, shared, columns)
        return
    for values in zip(*columns.values(), strict=True):
        emit(event, **shared, **dict(zip(columns, values, strict=True)))


class LineFile:
    """An append-only text file that can be truncated to an earlier size.

    A resumed run truncates its files to the sizes at its checkpoint, so that no line appears twice.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        """Opens `path` at its end; with `keep_bytes`, truncates it to that size first."""
        self._file = path.open("ab")
        if keep_bytes is not None:
            self._file.truncate(keep_bytes)
            self._file.seek(0, os.SEEK_END)

    @property
    def size_bytes(self) -> int:
        return self._file.tell()

    def append(self, line: str) -> None:
        """Writes a line, or several, and flushes it to the operating system."""
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Makes all appended lines durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Later:
    """Does work at once, or, if `is_patient`, in the same order when somebody has time for it."""

    def __init__(self) -> None:
        self.is_patient = False
        self._work: deque[Callable[[], None]] = deque()

    def __call__(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        if not self.is_patient:
            self.catch_up()

    def catch_up(self) -> None:
        """Does all work that waits."""
        while self._work:
            self._work.popleft()()


class EventLog:
    """Emits events into `events.jsonl`. `later`: when their lines are written; each has the moment of its event."""

    def __init__(self, lines: LineFile, clock: Clock, later: Later | None = None) -> None:
        self._lines = lines
        self._clock = clock
        self._later = later or Later()

    def __call__(self, event: str, **values: Any) -> None:
        self._later(partial(self._write, self._clock(), event, values))

    def each(self, event: str, shared: Mapping[str, Any], columns: Mapping[str, Sequence[Any]]) -> None:
        """The same event for each line of the columns, at one moment."""
        self._later(partial(self._write_each, self._clock(), event, shared, columns))

    def _write(self, moment: datetime, event: str, values: Mapping[str, Any]) -> None:
        self._lines.append(json_values.dumps_finite(_begin(moment, event, values)))

    def _write_each(
        self, moment: datetime, event: str, shared: Mapping[str, Any], columns: Mapping[str, Sequence[Any]]
    ) -> None:
        begin = json_values.dumps_finite(_begin(moment, event, shared))[:-1]
        cells = [
            [f'{begin if not at else ""}, "{key}": {text}' for text in json_values.dumps_each(column)]
            for at, (key, column) in enumerate(columns.items())
        ]
        lines = ["".join(each) + "}" for each in zip(*cells, strict=True)]
        if lines:
            self._lines.append("\n".join(lines))


def _begin(moment: datetime, event: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"time": moment.isoformat(timespec="milliseconds"), "event": event, **values}
