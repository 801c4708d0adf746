"""Queries of enrolled devices and their certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, Literal

from cryptography import x509
from sqlalchemy import ColumnElement, Connection, delete, func, insert, or_, select, update

from coordinator import pki
from coordinator.db.tables import certificates, devices

State = Literal["pending", "active", "revoked", "left"]


@dataclass(frozen=True)
class DeviceRow:
    """A device as the table has it. `csr` is kept while a person has yet to approve; `report` is its last CheckIn."""

    id: str
    name: str
    device_group: str
    serial_number: str | None
    state: State
    token: str | None
    key_sha256: str
    csr: str | None
    enrolled_at: datetime
    certificate_until: datetime | None
    last_seen_at: datetime | None
    expected_at: datetime | None
    report: Mapping[str, Any]


def find(connection: Connection, device: str) -> DeviceRow | None:
    """The device of this id."""
    return _one(connection, devices.c.id == device)


def by_key(connection: Connection, key_sha256: str) -> DeviceRow | None:
    """The device that enrolled with this key."""
    return _one(connection, devices.c.key_sha256 == key_sha256)


def listed(
    connection: Connection,
    limit: int,
    *,
    after: str | None = None,
    state: State | None = None,
    group: str | None = None,
    called: str | None = None,
) -> list[DeviceRow]:
    """At most `limit` devices by id, those after `after`; of a state, of a group, called so.

    `called` is a name, or how an id begins.
    """
    wanted = select(*_COLUMNS).order_by(devices.c.id).limit(limit)
    if after is not None:
        wanted = wanted.where(devices.c.id > after)
    if state is not None:
        wanted = wanted.where(devices.c.state == state)
    if group is not None:
        wanted = wanted.where(devices.c.device_group == group)
    if called is not None:
        begins = devices.c.id.startswith(called.lower(), autoescape=True)
        wanted = wanted.where(or_(devices.c.name == called, begins))
    return [DeviceRow(*row) for row in connection.execute(wanted)]


def add(connection: Connection, device: DeviceRow) -> None:
    connection.execute(insert(devices).values(asdict(device)))


def change_state(connection: Connection, device: str, state: State) -> None:
    """Sets the state; a request for a certificate is of no more use then."""
    connection.execute(update(devices).where(devices.c.id == device).values(state=state, csr=None))


def add_certificate(connection: Connection, device: str, certificate: x509.Certificate) -> None:
    """Keeps a certificate that the device may get again if the answer is lost."""
    until = certificate.not_valid_after_utc
    connection.execute(
        insert(certificates).values(
            serial=pki.serial_of(certificate),
            device=device,
            pem=pki.pem_of(certificate),
            key_sha256=pki.key_sha256(certificate.public_key()),
            not_before=certificate.not_valid_before_utc,
            not_after=until,
        )
    )
    connection.execute(update(devices).where(devices.c.id == device).values(certificate_until=until))


def certificates_since(connection: Connection, device: str, begun_after: datetime) -> int:
    """How many certificates the device was given since then."""
    counted = select(func.count()).where(
        certificates.c.device == device, certificates.c.not_before > begun_after
    )
    return int(connection.execute(counted).scalar_one())


def drop_certificates(connection: Connection, device: str, ended_before: datetime) -> None:
    """Forgets certificates of the device that nobody can renew any more."""
    connection.execute(
        delete(certificates).where(certificates.c.device == device, certificates.c.not_after < ended_before)
    )


def latest_certificate(connection: Connection, key_sha256: str) -> tuple[str, x509.Certificate] | None:
    """Device and certificate of those with this key that ends last."""
    row = connection.execute(
        select(certificates.c.device, certificates.c.pem)
        .where(certificates.c.key_sha256 == key_sha256)
        .order_by(certificates.c.not_after.desc(), certificates.c.not_before.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else (row.device, x509.load_pem_x509_certificate(row.pem.encode()))


_COLUMNS: Sequence[ColumnElement[Any]] = [devices.c[field.name] for field in fields(DeviceRow)]


def _one(connection: Connection, which: ColumnElement[bool]) -> DeviceRow | None:
    row = connection.execute(select(*_COLUMNS).where(which)).one_or_none()
    return None if row is None else DeviceRow(*row)
