"""Progress of long jobs: the protocol of those that show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from coordinator.rounds.records import RoundRecord


class Progress(Protocol):
    """Receives the stages and notes of a run or a job, and its rounds, steps or epochs."""

    def stage(self, message: str, /) -> None: ...

    def note(self, message: str, /) -> None: ...

    def begin(self, rounds: int, done: int) -> None: ...

    def round(self, record: RoundRecord) -> None: ...

    def trained(self, line: Mapping[str, Any], /) -> None:
        """A worker's progress: `step` of `steps` or `epoch` of `epochs`, `loss`, `lr`, `seconds`."""


class Quiet:
    """Ignores all progress, of runs and of datacenter jobs."""

    def stage(self, message: str, /) -> None: ...

    def note(self, message: str, /) -> None: ...

    def begin(self, rounds: int, done: int) -> None: ...

    def round(self, record: RoundRecord) -> None: ...

    def trained(self, line: Mapping[str, Any], /) -> None: ...
