"""Operator API: enrolled devices; approve or revoke one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from coordinator.accounts import enrolment
from coordinator.accounts.enrolment_tokens import TEXT_LIMIT
from coordinator.api.deps import RequestBody, ServicesDep
from coordinator.context.services import Services
from coordinator.db import devices
from coordinator.db.devices import DeviceRow, State
from coordinator.scheduling.matching import Presence, presence

_NO_NUL = "^[^\\x00]*$"  # PostgreSQL rejects NUL in text

router = APIRouter(tags=["devices"])


class Device(BaseModel):
    """An enrolled machine."""

    id: str
    name: str
    group: str
    state: State
    serial_number: str | None
    enrolled_at: datetime
    certificate_until: datetime | None
    last_seen_at: datetime | None
    expected_at: datetime | None = Field(description="Time of its next check-in.")
    presence: Presence = Field(
        description="Late: that time has passed; offline: a minute ago or more, or it never checked in."
    )
    report: dict[str, Any] = Field(description="Its report at the last check-in.")


class Devices(BaseModel):
    """A page of devices, by id."""

    devices: list[Device]
    next: str | None = Field(description="`after` for the next page; null on the last one.")


class Revocation(RequestBody):
    reason: str = Field(
        "", max_length=TEXT_LIMIT, description="Why, for people; in the event and the audit log."
    )


@router.get("/devices")
def list_devices(
    services: ServicesDep,
    state: State | None = None,
    group: Annotated[str | None, Query(pattern=_NO_NUL)] = None,
    called: Annotated[
        str | None, Query(pattern=_NO_NUL, description="A name, or the beginning of an id.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(pattern=_NO_NUL, description="Only ids after this one.")] = None,
) -> Devices:
    """Devices by id, a page at a time."""
    rows = services.database.read(
        lambda at: devices.listed(at, limit + 1, after=after, state=state, group=group, called=called)
    )
    page = rows[:limit]
    now = services.clock()
    return Devices(
        devices=[_render(row, now) for row in page], next=page[-1].id if len(rows) > limit else None
    )


@router.get("/devices/{device}")
def get_device(device: str, services: ServicesDep) -> Device:
    """One device."""
    row = services.database.read(lambda at: enrolment.require_device(at, device))
    return _render(row, services.clock())


@router.post("/devices/{device}/approve")
def approve_device(device: str, services: ServicesDep) -> Device:
    """Admits a pending device, which learns of it when it asks again, within half a minute."""
    return _write(
        services, device, lambda at: enrolment.approve(at, services.authority, device, services.clock())
    )


@router.post("/devices/{device}/revoke")
def revoke_device(device: str, services: ServicesDep, body: Revocation | None = None) -> Device:
    """Excludes a device for good from its next request on; a pending one is rejected."""
    reason = body.reason if body is not None else ""
    return _write(services, device, lambda at: enrolment.revoke(at, device, services.clock(), reason))


def _write(services: Services, device: str, work: Callable[[Connection], DeviceRow]) -> Device:
    live = (f"run:{deployment.run}" for deployment in services.deployments.active())
    return _render(services.commit(work, f"device:{device}", "devices", *live), services.clock())


def _render(row: DeviceRow, now: datetime) -> Device:
    there = presence(row.last_seen_at, row.expected_at, now) if row.state == "active" else "offline"
    return Device(group=row.device_group, presence=there, **vars(row))
