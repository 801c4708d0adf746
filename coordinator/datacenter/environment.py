"""What a datacenter command needs besides its configuration: folders, progress display, clock, queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from coordinator.datacenter.pretrain_queue import Queue
from coordinator.reports.progress import Quiet
from coordinator.rounds.events import Clock


class Progress(Protocol):
    """Displays the progress of a job."""

    def stage(self, message: str) -> None: ...

    def note(self, message: str) -> None: ...

    def trained(self, line: Mapping[str, Any]) -> None:
        """A worker's progress: `step` of `steps`, `loss`, `lr`, `seconds`."""


@dataclass(frozen=True)
class Environment:
    """The environment of a datacenter command.

    Attributes:
        queue: where a pretraining waits for slots; without one it starts at once.
    """

    data_dir: Path | None = None
    progress: Progress = Quiet()  # noqa: RUF009 - stateless
    clock: Clock = lambda: datetime.now(UTC)
    queue: Queue | None = None
