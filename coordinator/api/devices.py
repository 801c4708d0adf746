"""Operator API: enrolled devices, what each did and sent; approve, revoke or regroup one."""

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
from coordinator.db import device_history, devices, events
from coordinator.db.device_history import DeviceTask
from coordinator.db.devices import DeviceRow, State
from coordinator.errors import Refusal
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
    relay: str | None = Field(None, description="Id of the relay that it belongs to.")
    relay_names: list[str] | None = Field(
        None, description="Of a relay: host names and addresses that devices reach it at."
    )


class Devices(BaseModel):
    """A page of devices, by id."""

    devices: list[Device]
    next: str | None = Field(description="`after` for the next page; null on the last one.")


class Revocation(RequestBody):
    reason: str = Field(
        "", max_length=TEXT_LIMIT, description="Why, for people; in the event and the audit log."
    )


class GroupChange(RequestBody):
    group: str = Field(min_length=1, max_length=TEXT_LIMIT)


class DeviceTasks(BaseModel):
    """A page of a device's tasks, of the newest run and round first."""

    tasks: list[DeviceTask]
    next: str | None = Field(description="`after` for the next page; null on the last one.")


class DeviceEvents(BaseModel):
    """A page of a device's events, newest first."""

    events: list[dict[str, Any]]
    next: int | None = Field(description="`before` for the next page; null on the last one.")


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


@router.get("/devices/{device}/tasks")
def list_device_tasks(
    device: str,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    after: Annotated[str | None, Query(pattern=_NO_NUL, description="Only those behind this task.")] = None,
) -> DeviceTasks:
    """What the device was asked to do, how that ended, and what it sent.

    404 `not_found`: there is no such device, or it has no task `after`.
    """

    def read(at: Connection) -> list[DeviceTask]:
        found = device_history.tasks_of(at, enrolment.require_device(at, device).id, limit + 1, after)
        if found is None:
            raise Refusal(404, "not_found", f"this device has no task {str(after)[:40]!r}")
        return found

    rows = services.database.read(read)
    return DeviceTasks(tasks=rows[:limit], next=rows[limit - 1].id if len(rows) > limit else None)


@router.get("/devices/{device}/events")
def list_device_events(
    device: str,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    before: Annotated[int | None, Query(ge=1, lt=2**63, description="Only smaller ids.")] = None,
) -> DeviceEvents:
    """What happened to the device: enrolment, tasks, updates, releases."""
    rows = services.database.read(
        lambda at: device_history.events_of(at, enrolment.require_device(at, device).id, limit + 1, before)
    )
    page = [events.as_json(row) for row in rows[:limit]]
    return DeviceEvents(events=page, next=rows[limit - 1].id if len(rows) > limit else None)


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


@router.post("/devices/{device}/group")
def change_device_group(device: str, services: ServicesDep, body: GroupChange) -> Device:
    """Puts a device into another group: runs select it by that from their next round on, and later rollouts.

    409 `not_enrolled`: it left or is revoked.
    """
    return _write(services, device, lambda at: enrolment.regroup(at, device, body.group, services.clock()))


def _write(services: Services, device: str, work: Callable[[Connection], DeviceRow]) -> Device:
    live = (f"run:{deployment.run}" for deployment in services.deployments.active())
    return _render(services.commit(work, f"device:{device}", "devices", *live), services.clock())


def _render(row: DeviceRow, now: datetime) -> Device:
    there = presence(row.last_seen_at, row.expected_at, now) if row.state == "active" else "offline"
    return Device(group=row.device_group, presence=there, **vars(row))
