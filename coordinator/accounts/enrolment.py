"""Membership of devices: enrolment, approval, renewal, revocation and leaving.

Each function makes one decision inside one `database.write`, so that a hundred devices with one single-use token get one
certificate between them. The holder of a certificate's key is the device; a token only admits it.

    token ──► pending ──(an operator approves)──► active ──► left, or revoked
         └───────────────────────────────────►
"""

from __future__ import annotations

import base64
import binascii
import uuid
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from sqlalchemy import Connection

from coordinator import certificates
from coordinator.accounts import certificate_authority, enrolment_tokens
from coordinator.accounts.certificate_authority import Authority
from coordinator.db import devices, rounds
from coordinator.db.devices import DeviceRow
from coordinator.db.events import record
from coordinator.db.tokens import TokenRow
from coordinator.errors import Refusal
from coordinator.settings import Settings
from edge_client.wire.device import Enrolled, EnrolRequest, RenewRequest

RENEWALS_PER_DAY = 10
"""Certificates per device and day: enough to make up for lost answers, too few to fill the table."""

_RETRY_SECONDS = 30.0


def enrol(
    connection: Connection, authority: Authority, settings: Settings, request: EnrolRequest, now: datetime
) -> Enrolled:
    """Enrols the holder of this key as a device; a repeated request with the same key gets the same device.

    Raises:
        Refusal: 403 `token_unknown`, `token_used`, `token_expired`, `serial_unknown`, `serial_used`, `revoked`,
            `unknown_device`; 422 `bad_csr`, `malformed`.
    """
    csr = certificate_authority.read_request(request.csr)
    key = certificates.key_sha256(csr.public_key())
    token = enrolment_tokens.find_token(connection, authority, request.token)
    known = devices.by_key(connection, key)
    if known is not None:
        return _repeat_answer(connection, known)
    if devices.latest_certificate(connection, key) is not None:
        raise Refusal(
            422, "bad_csr", "another device renewed its certificate with this key; generate a new one"
        )
    enrolment_tokens.require_usable(token, now)
    device = _new_device(connection, settings, token, request, key, now)
    enrolment_tokens.use_token(connection, token, device)
    devices.add(connection, device)
    event = "device_pending" if device.state == "pending" else "device_enrolled"
    record(connection, now, event, device=device.id, name=device.name, group=device.device_group)
    if device.state == "pending":
        return _pending(device.id)
    return _add_certificate(connection, device.id, authority.issue_device(csr, device.id, now))


def renew(
    connection: Connection, authority: Authority, settings: Settings, request: RenewRequest, now: datetime
) -> Enrolled:
    """The next certificate for the holder of this certificate's key, also for a grace period after it expired.

    The certificate shown stays valid until its own end; shown again, it gets the same answer. One that is not valid yet
    was issued while the coordinator's clock was ahead; it is renewed too, since its device would otherwise be locked out.

    Raises:
        Refusal: 401 `foreign_certificate`, `expired`, `not_yet_valid`; 403 `bad_proof`, `revoked`, `unknown_device`;
            422 `bad_csr`, `malformed`; 429 `too_many_requests`.
    """
    grace = timedelta(days=settings.renew_after_expiry_days)
    shown = _parse_certificate(request.certificate)
    device = _require_member(devices.find(connection, authority.verify(shown, now, grace)))
    csr = certificate_authority.read_request(request.csr)
    _check_proof(shown, csr, request.proof)
    key = certificates.key_sha256(csr.public_key())
    owner, latest = devices.latest_certificate(connection, key) or (None, None)
    enrolled_with = devices.by_key(connection, key)
    if owner not in (None, device.id) or (enrolled_with is not None and enrolled_with.id != device.id):
        raise Refusal(422, "bad_csr", "this key belongs to another device; generate a new one")
    if (
        latest is not None
        and latest.serial_number != shown.serial_number
        and now < latest.not_valid_after_utc
    ):
        return _enrolled(device.id, latest)
    devices.drop_certificates(connection, device.id, now - grace)
    if devices.certificates_since(connection, device.id, now - timedelta(days=1)) >= RENEWALS_PER_DAY:
        raise Refusal(
            429, "too_many_requests", f"a device gets at most {RENEWALS_PER_DAY} certificates per day"
        )
    record(connection, now, "device_renewed", device=device.id)
    return _add_certificate(connection, device.id, authority.issue_device(csr, device.id, now))


def approve(connection: Connection, authority: Authority, device: str, now: datetime) -> DeviceRow:
    """Admits a pending device; no effect on an active one.

    Raises:
        Refusal: 404 `not_found`; 409 `not_pending`.
    """
    row = require_device(connection, device)
    if row.state == "pending":
        assert row.csr is not None  # kept with every pending device
        certificate = authority.issue_device(certificate_authority.read_request(row.csr), row.id, now)
        devices.change_state(connection, row.id, "active")
        devices.add_certificate(connection, row.id, certificate)
        record(connection, now, "device_approved", device=row.id)
    elif row.state != "active":
        raise Refusal(
            409,
            "not_pending",
            f"this device {'left' if row.state == 'left' else 'is revoked'}; it must enrol again with a new key",
        )
    return require_device(connection, device)


def revoke(connection: Connection, device: str, now: datetime, reason: str = "") -> DeviceRow:
    """Excludes a device for good from its next request on, and ends its live tasks.

    `reason`: for people, in the event.

    Raises:
        Refusal: 404 `not_found`; 422 `malformed`: the reason.
    """
    details = {"reason": enrolment_tokens.plain_text(reason, "reason")} if reason else {}
    row = require_device(connection, device)
    if row.state != "revoked":
        devices.change_state(connection, row.id, "revoked")
        rounds.expire_tasks_of(connection, row.id, now, "revoked", "it was revoked")
        record(connection, now, "device_revoked", device=row.id, **details)
    return require_device(connection, device)


def regroup(connection: Connection, device: str, group: str, now: datetime) -> DeviceRow:
    """Puts a pending or active device into another group. Its certificate and its tasks stay as they are.

    Raises:
        Refusal: 404 `not_found`; 409 `not_enrolled`; 422 `malformed`: the group.
    """
    wanted = enrolment_tokens.plain_text(group, "group")
    row = require_device(connection, device)
    if row.state not in ("pending", "active"):
        raise Refusal(
            409,
            "not_enrolled",
            f"this device {'left' if row.state == 'left' else 'is revoked'}; it is in no group",
        )
    if row.device_group != wanted:
        devices.change_group(connection, row.id, wanted)
        record(connection, now, "device_regrouped", device=row.id, before=row.device_group, group=wanted)
    return require_device(connection, device)


def leave(connection: Connection, device: str, now: datetime) -> None:
    """Ends a device's membership at its own request, and ends its live tasks."""
    devices.change_state(connection, device, "left")
    rounds.expire_tasks_of(connection, device, now, "left", "it left the federation")
    record(connection, now, "device_left", device=device)


def require_active(row: DeviceRow | None) -> DeviceRow:
    """The same device, if it is active.

    Raises:
        Refusal: 403 `unknown_device`, `revoked`, `pending`.
    """
    row = _require_member(row)
    if row.state == "pending":
        raise Refusal(403, "pending", "an operator has yet to approve this device: fedloop device approve")
    return row


def require_device(connection: Connection, device: str) -> DeviceRow:
    """The device of this id.

    Raises:
        Refusal: 404 `not_found`.
    """
    row = devices.find(connection, device) if device.isprintable() else None
    if row is None:
        raise Refusal(404, "not_found", f"there is no device {device[:40]!r}")
    return row


def _repeat_answer(connection: Connection, device: DeviceRow) -> Enrolled:
    """The answer to a known key, which costs no use of a token."""
    if _require_member(device).state == "pending":
        return _pending(device.id)
    latest = devices.latest_certificate(connection, device.key_sha256)
    if latest is None:
        raise Refusal(403, "unknown_device", "this key's certificates expired long ago; enrol with a new key")
    return _enrolled(device.id, latest[1])


def _new_device(
    connection: Connection,
    settings: Settings,
    token: TokenRow,
    request: EnrolRequest,
    key: str,
    now: datetime,
) -> DeviceRow:
    pending = token.needs_approval or settings.needs_approval
    serial = request.serial_number
    if serial is not None:
        serial = enrolment_tokens.plain_text(serial, "serial_number")
    return DeviceRow(
        id=str(uuid.uuid4()),
        name=enrolment_tokens.plain_text(request.name, "name"),
        device_group=enrolment_tokens.group_of(connection, token, serial),
        serial_number=serial,
        state="pending" if pending else "active",
        token=token.id,
        key_sha256=key,
        csr=request.csr if pending else None,
        enrolled_at=now,
        project=token.project,
        relay=token.relay,
        relay_names=token.relay_names,
    )


def _require_member(device: DeviceRow | None) -> DeviceRow:
    if device is None:
        raise Refusal(403, "unknown_device", "this coordinator does not know this device; enrol again")
    if device.state == "revoked":
        raise Refusal(403, "revoked", "an operator revoked this device")
    if device.state == "left":
        raise Refusal(403, "unknown_device", "this device left the federation; enrol again to come back")
    return device


def _parse_certificate(pem: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except Exception as error:  # a parser may raise anything on untrusted bytes
        raise Refusal(422, "malformed", "`certificate` is not a certificate in PEM") from error


def _check_proof(shown: x509.Certificate, csr: x509.CertificateSigningRequest, proof: str) -> None:
    key = shown.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)  # the authority signs no other kind
    try:
        signature = base64.b64decode(proof, validate=True)
        key.verify(signature, csr.public_bytes(serialization.Encoding.DER), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, binascii.Error, ValueError):
        raise Refusal(
            403, "bad_proof", "`proof` is not a signature of the request by the certificate's key"
        ) from None


def _add_certificate(connection: Connection, device: str, certificate: x509.Certificate) -> Enrolled:
    devices.add_certificate(connection, device, certificate)
    return _enrolled(device, certificate)


def _enrolled(device: str, certificate: x509.Certificate) -> Enrolled:
    return Enrolled(device, certificates.pem_of(certificate), certificate.not_valid_after_utc.isoformat())


def _pending(device: str) -> Enrolled:
    return Enrolled(device, "", "", _RETRY_SECONDS)
