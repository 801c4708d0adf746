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
from coordinator.releases.incoming import Incoming
from coordinator.releases.repository import Repository
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

    @cached_property
    def releases(self) -> Repository:
        """What devices may install, signed."""
        return Repository(self.settings.home / "releases", self.clock)

    @cached_property
    def incoming_releases(self) -> Incoming:
        """What people send to be published."""
        return Incoming(self.settings.home / "releases" / "incoming")

    @cached_property
    def incoming_models(self) -> Incoming:
        """What people send to be registered; what the process before got of it is sent anew."""
        incoming = Incoming(self.settings.home / "models" / "incoming")
        incoming.clear()
        return incoming
