"""Queries of enrolled devices and their certificates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from cryptography import x509
from sqlalchemy import Connection, delete, func, insert, or_, select, update

from coordinator.certificates import key_sha256, pem_of, serial_of
from coordinator.db.tables import certificates, columns_of, devices, find_row
from coordinator.project_names import DEFAULT_PROJECT
from coordinator.short_ids import short_id

State = Literal["pending", "active", "revoked", "left"]


@dataclass(frozen=True)
class DeviceRow:
    """A row of `devices`. `csr` is kept until an operator approves the device; `report` is its last CheckIn.

    `relay`: the relay that it belongs to. `relay_names`: of a relay, the host names and addresses that devices reach it at.
    """

    id: str
    name: str
    device_group: str
    serial_number: str | None
    state: State
    token: str | None
    key_sha256: str
    csr: str | None
    enrolled_at: datetime
    certificate_until: datetime | None = None
    last_seen_at: datetime | None = None
    expected_at: datetime | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    project: str = DEFAULT_PROJECT
    relay: str | None = None
    relay_names: Sequence[str] | None = None

    @property
    def is_relay(self) -> bool:
        return self.relay_names is not None


def find(connection: Connection, device: str) -> DeviceRow | None:
    """The device of this id."""
    return find_row(connection, DeviceRow, devices, devices.c.id == device)


def names(connection: Connection, ids: Collection[str]) -> dict[str, str]:
    """The names of these devices; of several with one name, each with the beginning of its id."""
    rows = connection.execute(select(devices.c.id, devices.c.name).where(devices.c.id.in_(ids))).all()
    called = Counter(row.name for row in rows)
    return {row.id: row.name if called[row.name] == 1 else f"{row.name} ({short_id(row.id)})" for row in rows}


def by_key(connection: Connection, key_sha256: str) -> DeviceRow | None:
    """The device that enrolled with this key."""
    return find_row(connection, DeviceRow, devices, devices.c.key_sha256 == key_sha256)


def listed(
    connection: Connection,
    limit: int,
    *,
    after: str | None = None,
    state: State | None = None,
    group: str | None = None,
    called: str | None = None,
) -> list[DeviceRow]:
    """At most `limit` devices by id, after the id `after`; of a state, of a group, called so.

    `called` is a name, or the beginning of an id.
    """
    query = select(*columns_of(devices, DeviceRow)).order_by(devices.c.id).limit(limit)
    if after is not None:
        query = query.where(devices.c.id > after)
    if state is not None:
        query = query.where(devices.c.state == state)
    if group is not None:
        query = query.where(devices.c.device_group == group)
    if called is not None:
        has_prefix = devices.c.id.startswith(called.lower(), autoescape=True)
        query = query.where(or_(devices.c.name == called, has_prefix))
    return [DeviceRow(*row) for row in connection.execute(query)]


def add(connection: Connection, device: DeviceRow) -> None:
    connection.execute(insert(devices).values(asdict(device)))


def change_state(connection: Connection, device: str, state: State) -> None:
    """Sets the state and drops the certificate request, which is of no more use."""
    connection.execute(update(devices).where(devices.c.id == device).values(state=state, csr=None))


def change_group(connection: Connection, device: str, group: str) -> None:
    connection.execute(update(devices).where(devices.c.id == device).values(device_group=group))


def add_certificate(connection: Connection, device: str, certificate: x509.Certificate) -> None:
    """Stores a certificate, so that the device can get it again if the answer is lost."""
    until = certificate.not_valid_after_utc
    connection.execute(
        insert(certificates).values(
            serial=serial_of(certificate),
            device=device,
            pem=pem_of(certificate),
            key_sha256=key_sha256(certificate.public_key()),
            not_before=certificate.not_valid_before_utc,
            not_after=until,
        )
    )
    connection.execute(update(devices).where(devices.c.id == device).values(certificate_until=until))


def certificates_since(connection: Connection, device: str, begun_after: datetime) -> int:
    """Number of certificates issued to the device since then."""
    counted = select(func.count()).where(
        certificates.c.device == device, certificates.c.not_before > begun_after
    )
    return int(connection.execute(counted).scalar_one())


def drop_certificates(connection: Connection, device: str, ended_before: datetime) -> None:
    """Deletes certificates of the device that can no longer be renewed."""
    connection.execute(
        delete(certificates).where(certificates.c.device == device, certificates.c.not_after < ended_before)
    )


def latest_certificate(connection: Connection, key_sha256: str) -> tuple[str, x509.Certificate] | None:
    """The certificate with this key that expires last, and its device."""
    row = connection.execute(
        select(certificates.c.device, certificates.c.pem)
        .where(certificates.c.key_sha256 == key_sha256)
        .order_by(certificates.c.not_after.desc(), certificates.c.not_before.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else (row.device, x509.load_pem_x509_certificate(row.pem.encode()))
