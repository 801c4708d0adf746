"""What every part of a serving coordinator is given, made once by `coordinator.serve`.

Routes find it as `request.app.state.services`; runs and fleets get it as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property

from coordinator.blobs import Blobs
from coordinator.db.store import Database
from coordinator.device_api.limits import Limits
from coordinator.device_api.ticks import Ticks
from coordinator.fleets.deployments import Deployments
from coordinator.fleets.pacing import Pacing
from coordinator.part_files import PartFiles
from coordinator.pki import Authority
from coordinator.settings import Settings
from coordinator.signals import Signals

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Services:
    """Settings, stores and wake-ups of one process."""

    settings: Settings
    database: Database
    blobs: Blobs
    signals: Signals
    authority: Authority
    clock: Clock = utc_now
    deployments: Deployments = field(default_factory=Deployments)
    pacing: Pacing = field(default_factory=Pacing)
    limits: Limits = field(default_factory=Limits)
    ticks: Ticks = field(default_factory=Ticks)

    @cached_property
    def part_files(self) -> PartFiles:
        """Uploads on their way."""
        return PartFiles(self.settings.home / "uploads")
