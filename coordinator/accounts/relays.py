"""Relays among the devices: which tokens admit them or their devices, and the certificate with which one answers devices.

Devices take whoever has such a certificate for the coordinator. So an operator names the hosts that it is for, when making the
token, and a name of the coordinator itself is refused.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import datetime

from cryptography import x509
from sqlalchemy import Connection

from coordinator.accounts import certificate_authority
from coordinator.accounts.certificate_authority import Authority, general_name
from coordinator.db import devices
from coordinator.db.devices import DeviceRow
from coordinator.errors import Refusal, UserError


def check_terms(
    connection: Connection,
    authority: Authority,
    relay: str | None,
    names: Sequence[str] | None,
    project: str,
) -> tuple[str | None, list[str] | None]:
    """The relay that a token's devices belong to, and the names of the relays that it admits.

    Raises:
        Refusal: 422 `malformed`: both are given, or a name is no host's, or the coordinator's own; 404 `not_found`, 409 `no_relay`:
            there is no such relay.
    """
    if relay is not None and names is not None:
        raise Refusal(
            422, "malformed", "relay and relay_names: a relay does not belong to another; give one of them"
        )
    if relay is not None:
        return _require_relay(connection, relay, project).id, None
    if names is None:
        return None, None
    own = {name.lower() for name in authority.own_names if not _is_loopback(name)}
    for name in names:
        try:
            general_name(name)
        except UserError as error:
            raise Refusal(422, "malformed", f"relay_names: {error}") from None
        if name.lower() in own:
            raise Refusal(
                422,
                "malformed",
                f"relay_names: {name!r} is the coordinator's own name; a relay with it could take its place for every device",
            )
    return None, list(names)


def _require_relay(connection: Connection, relay: str, project: str) -> DeviceRow:
    row = devices.find(connection, relay) if relay.isprintable() else None
    if row is None or row.project != project:
        raise Refusal(404, "not_found", f"there is no device {relay[:40]!r}")
    if not row.is_relay or row.state not in ("active", "pending"):
        raise Refusal(
            409,
            "no_relay",
            f"{row.name} is not a relay of this fleet; enrol one: fedloop device token --relay-name HOST",
        )
    return row


def issue_certificate(authority: Authority, relay: DeviceRow, csr: str, now: datetime) -> x509.Certificate:
    """The certificate with which a relay answers its devices. Raises: Refusal: 422 `bad_csr`."""
    assert relay.relay_names is not None
    return authority.issue_relay(certificate_authority.read_request(csr), relay.relay_names, now)


def _is_loopback(name: str) -> bool:
    """Such names are every machine's own, so the coordinator and a relay on its machine share them."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
