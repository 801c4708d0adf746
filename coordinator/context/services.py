"""The services of a coordinator process, created once by `coordinator.server.serve`.

Routes receive them as a parameter `ServicesDep`; runs and fleets take them as an argument.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Annotated, Any, TypeVar

import structlog
from fastapi import Depends, Request
from sqlalchemy import Connection

from coordinator.accounts.certificate_authority import Authority
from coordinator.audit.heads import Heads
from coordinator.context.signals import Signals
from coordinator.db.store import Database
from coordinator.limits.rates import DeviceRequests, SignIns, WrongTokens
from coordinator.limits.uploads_in_flight import UploadSlots
from coordinator.oidc.configuration import configuration_of
from coordinator.oidc.pending import PendingSignIns
from coordinator.oidc.provider import Provider
from coordinator.releases.incoming import Incoming
from coordinator.releases.repository import Repository
from coordinator.scheduling.deployments import Deployments
from coordinator.scheduling.pacing import Pacing
from coordinator.settings import Settings
from coordinator.storage.blobs import Blobs, PartFiles

Clock = Callable[[], datetime]
T = TypeVar("T")

PASSWORDS_AT_A_TIME = 2
"""Hashed or compared; each takes 64 MiB and a tenth of a second."""

_log = structlog.get_logger("fedloop.devices")


def utc_now() -> datetime:
    return datetime.now(UTC)


class DeviceLog:
    """Device states in the log: one line when a device's state has changed since its last check-in, none otherwise.

    Not thread-safe: only the event loop's thread may call it.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, dict[str, Any]]] = {}

    def log(self, device: str, state: str, **values: Any) -> None:
        """Logs the device's state and all truthy values, unless the last line of the device was the same."""
        present = {key: value for key, value in values.items() if value}
        if self._last.get(device) != (state, present):
            self._last[device] = (state, present)
            _log.info("device", device=device, state=state, **present)

    def forget(self, device: str) -> None:
        """Drops the state of a device that left or was revoked."""
        self._last.pop(device, None)


class Opened:
    """What a process opens once, when it is first needed."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock

    @cached_property
    def oidc(self) -> Provider | None:
        """The OpenID provider at which people may sign in. Raises: UserError: its settings are incomplete."""
        configuration = configuration_of(self.settings)
        return None if configuration is None else Provider(configuration)

    @cached_property
    def uploads_in_flight(self) -> UploadSlots:
        """Bounds the uploads that are received at the same time."""
        return UploadSlots(self.settings.upload_memory_bytes)

    @cached_property
    def part_files(self) -> PartFiles:
        """Uploads that are not complete yet."""
        return PartFiles(self.settings.home / "uploads")

    @cached_property
    def audit_heads(self) -> Heads:
        """Signs heads of the audit log."""
        return Heads(self.settings.home / "audit")

    @cached_property
    def releases(self) -> Repository:
        """Signed releases that devices may install."""
        return Repository(self.settings.home / "releases", self.clock)

    @cached_property
    def incoming_releases(self) -> Incoming:
        """Uploads of releases to publish."""
        return Incoming(self.settings.home / "releases" / "incoming")

    @cached_property
    def incoming_models(self) -> Incoming:
        """Uploads of models to register. Incomplete ones of an earlier process are dropped; clients send them again."""
        incoming = Incoming(self.settings.home / "models" / "incoming")
        incoming.clear()
        return incoming


@dataclass(frozen=True)
class Services:
    """Settings, stores and signals of one process.

    Attributes:
        database: all of it; of `for_project`, what one project owns.
        project: the one that these services work for; None: the process.
    """

    settings: Settings
    database: Database
    blobs: Blobs
    signals: Signals
    authority: Authority
    clock: Clock = utc_now
    deployments: Deployments = field(default_factory=Deployments)
    pacing: Pacing = field(default_factory=Pacing)
    limits: DeviceRequests = field(default_factory=DeviceRequests)
    device_log: DeviceLog = field(default_factory=DeviceLog)
    admin_guesses: WrongTokens = field(default_factory=WrongTokens)
    enrolment_guesses: WrongTokens = field(default_factory=WrongTokens)
    sign_ins: SignIns = field(default_factory=SignIns)
    pending_sign_ins: PendingSignIns = field(default_factory=PendingSignIns)
    password_threads: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, PASSWORDS_AT_A_TIME, thread_name_prefix="password")
    )
    project: str | None = None
    opened: Opened = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "opened", Opened(self.settings, self.clock))  # it is frozen

    def for_project(self, project: str) -> Services:
        """The same services, for one project: their database holds what it owns and nothing else."""
        view = replace(self, database=self.database.of_project(project), project=project)
        object.__setattr__(view, "opened", self.opened)
        return view

    async def write(self, work: Callable[[Connection], T]) -> T:
        """The result of `work` in one transaction of the database, without blocking the event loop."""
        return await asyncio.wrap_future(self.database.write(work))

    def commit(self, work: Callable[[Connection], T], *topics: str) -> T:
        """As `write` from a thread, which it blocks; then wakes what waits for events and for these topics."""
        result = self.database.write(work).result()
        self.signals.notify("events", *topics)
        return result

    @property
    def oidc(self) -> Provider | None:
        """The OpenID provider at which people may sign in. Raises: UserError: its settings are incomplete."""
        return self.opened.oidc

    @property
    def uploads_in_flight(self) -> UploadSlots:
        """Bounds the uploads that are received at the same time."""
        return self.opened.uploads_in_flight

    @property
    def part_files(self) -> PartFiles:
        """Uploads that are not complete yet."""
        return self.opened.part_files

    @property
    def audit_heads(self) -> Heads:
        """Signs heads of the audit log."""
        return self.opened.audit_heads

    @property
    def releases(self) -> Repository:
        """Signed releases that devices may install."""
        return self.opened.releases

    @property
    def incoming_releases(self) -> Incoming:
        """Uploads of releases to publish."""
        return self.opened.incoming_releases

    @property
    def incoming_models(self) -> Incoming:
        """Uploads of models to register."""
        return self.opened.incoming_models


def services_of(request: Request) -> Services:
    """The services of the process that serves this request."""
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(services_of)]
"""Type of a route's parameter that receives the services of the process; routes for people use `coordinator.api.deps`."""
