"""Progress of long jobs: the protocol of those that show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from coordinator.rounds.records import RoundRecord


class Progress(Protocol):
    """Receives the stages, notes and rounds of a job."""

    def stage(self, message: str, /) -> None: ...

    def note(self, message: str, /) -> None: ...

    def step(self, done: int, total: int) -> None: ...

    def begin(self, rounds: int, done: int) -> None: ...

    def round(self, record: RoundRecord) -> None: ...


class Quiet:
    """Ignores all progress, of runs and of datacenter jobs."""

    def stage(self, message: str, /) -> None: ...

    def note(self, message: str, /) -> None: ...

    def step(self, done: int, total: int) -> None: ...

    def begin(self, rounds: int, done: int) -> None: ...

    def round(self, record: RoundRecord) -> None: ...

    def trained(self, line: Mapping[str, Any], /) -> None: ...
