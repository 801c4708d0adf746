"""Who may take part: tokens, enrolment, approval, renewal, revocation, leaving.

Each function below is one decision inside one `database.write`, so that a hundred devices with one single-use token
get one certificate between them. Whoever holds the key of a certificate is the device; a token only admits.

    token ──► pending ──(a person approves)──► active ──► left, or revoked
         └───────────────────────────────────►
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from sqlalchemy import Connection

from coordinator import pki
from coordinator.db import devices, rounds, tokens
from coordinator.db.devices import DeviceRow
from coordinator.db.events import record
from coordinator.db.tokens import TokenRow
from coordinator.errors import Refusal
from coordinator.pki import Authority
from coordinator.settings import Settings
from edge_client.wire.device import Enrolled, EnrolRequest, RenewRequest

TOKEN_FORM = "fl1"
TEXT_LIMIT = 200
RENEWALS_A_DAY = 10
"""Certificates that one device gets in a day: room for lost answers, none for filling the table."""
"""Characters of a name, a group, a serial number."""

_ASK_AGAIN_SECONDS = 30.0
_TOKENS_KEPT = timedelta(days=90)
"""After their end, so that refusals can say what became of one."""


@dataclass(frozen=True)
class TokenTerms:
    """What a token admits: `uses` devices, into one group, for so long."""

    uses: int
    ttl: timedelta
    group: str
    needs_approval: bool = False
    listed_serials_only: bool = False


@dataclass(frozen=True)
class NewToken:
    """A token, whose text is told once and kept nowhere."""

    row: TokenRow
    text: str


def make_token(connection: Connection, authority: Authority, terms: TokenTerms, now: datetime) -> NewToken:
    """A token that lets devices enrol; its text also pins the CA that they may believe."""
    secret = secrets.token_urlsafe(32)
    row = TokenRow(
        id=str(uuid.uuid4()),
        secret_sha256=_sha256(secret),
        device_group=plain_text(terms.group, "group"),
        uses_left=terms.uses,
        needs_approval=terms.needs_approval,
        listed_serials_only=terms.listed_serials_only,
        created_at=now,
        expires_at=now + terms.ttl,
    )
    tokens.drop(connection, now - _TOKENS_KEPT)
    tokens.add(connection, row)
    record(connection, now, "token_made", token=row.id, group=row.device_group, uses=terms.uses)
    return NewToken(row, f"{TOKEN_FORM}.{authority.ca_sha256}.{secret}")


def withdraw_token(connection: Connection, token: str, now: datetime) -> TokenRow:
    """Ends a token now; devices that enrolled with it stay.

    Raises:
        Refusal: 404 `not_found`.
    """
    row = tokens.by_id(connection, token) if token.isprintable() else None
    if row is None:
        raise Refusal(404, "not_found", f"there is no token {token[:40]!r}; see them: fedloop device tokens")
    if now < row.expires_at:
        tokens.end(connection, row.id, now)
        record(connection, now, "token_withdrawn", token=row.id, group=row.device_group)
    return replace(row, expires_at=min(row.expires_at, now))


def enrol(
    connection: Connection, authority: Authority, settings: Settings, request: EnrolRequest, now: datetime
) -> Enrolled:
    """Makes a device of the holder of this key, once; the same key asked again gets the same device.

    Raises:
        Refusal: 403 `token_unknown`, `token_used`, `token_expired`, `serial_unknown`, `serial_used`, `revoked`,
            `unknown_device`; 422 `bad_csr`, `malformed`.
    """
    csr = pki.read_request(request.csr)
    key = pki.key_sha256(csr.public_key())
    token = _token(connection, authority, request.token)
    known = devices.by_key(connection, key)
    if known is not None:
        return _again(connection, known)
    if devices.latest_certificate(connection, key) is not None:
        raise Refusal(422, "bad_csr", "this key was renewed to by another device; make a new one")
    _check_token(token, now)
    device = _new_device(connection, settings, token, request, key, now)
    _take_token(connection, token, device)
    devices.add(connection, device)
    if device.state == "pending":
        record(
            connection, now, "device_pending", device=device.id, name=device.name, group=device.device_group
        )
        return _waiting(device.id)
    record(connection, now, "device_enrolled", device=device.id, name=device.name, group=device.device_group)
    return _certified(connection, device.id, authority.issue_device(csr, device.id, now))


def renew(
    connection: Connection, authority: Authority, settings: Settings, request: RenewRequest, now: datetime
) -> Enrolled:
    """The next certificate for whoever holds the key of this one, also for a while after it expired.

    The certificate shown stays good until its own end, and shown again it gets the same answer again. One that is
    not valid yet was made while the coordinator's clock was ahead; it is renewed too, or its device were locked out.

    Raises:
        Refusal: 401 `foreign_certificate`, `expired`, `not_yet_valid`; 403 `bad_proof`, `revoked`, `unknown_device`;
            422 `bad_csr`, `malformed`; 429 `too_many_requests`.
    """
    grace = timedelta(days=settings.renew_after_expiry_days)
    shown = _certificate(request.certificate)
    device = _standing(devices.find(connection, authority.verify(shown, now, grace)))
    csr = pki.read_request(request.csr)
    _check_proof(shown, csr, request.proof)
    key = pki.key_sha256(csr.public_key())
    owner, latest = devices.latest_certificate(connection, key) or (None, None)
    enrolled_with = devices.by_key(connection, key)
    if owner not in (None, device.id) or (enrolled_with is not None and enrolled_with.id != device.id):
        raise Refusal(422, "bad_csr", "this key belongs to another device; make a new one")
    if (
        latest is not None
        and latest.serial_number != shown.serial_number
        and now < latest.not_valid_after_utc
    ):
        return _answer(device.id, latest)
    devices.drop_certificates(connection, device.id, now - grace)
    if devices.certificates_since(connection, device.id, now - timedelta(days=1)) >= RENEWALS_A_DAY:
        raise Refusal(429, "too_many_requests", f"{RENEWALS_A_DAY} certificates in a day are enough")
    record(connection, now, "device_renewed", device=device.id)
    return _certified(connection, device.id, authority.issue_device(csr, device.id, now))


def approve(connection: Connection, authority: Authority, device: str, now: datetime) -> DeviceRow:
    """Lets a pending device in; one that is in already stays so.

    Raises:
        Refusal: 404 `not_found`; 409 `not_pending`.
    """
    row = known_device(connection, device)
    if row.state == "pending":
        assert row.csr is not None  # kept with every pending device
        certificate = authority.issue_device(pki.read_request(row.csr), row.id, now)
        devices.change_state(connection, row.id, "active")
        devices.add_certificate(connection, row.id, certificate)
        record(connection, now, "device_approved", device=row.id)
    elif row.state != "active":
        raise Refusal(
            409,
            "not_pending",
            f"this device is {_STATE_WORDS[row.state]}; it must enrol anew, with a new key",
        )
    return known_device(connection, device)


def revoke(connection: Connection, device: str, now: datetime) -> DeviceRow:
    """Shuts a device out, from its next request on and for good; nothing waits for it any more.

    Raises:
        Refusal: 404 `not_found`.
    """
    row = known_device(connection, device)
    if row.state != "revoked":
        devices.change_state(connection, row.id, "revoked")
        rounds.give_up(connection, row.id, now, "revoked", "it was revoked")
        record(connection, now, "device_revoked", device=row.id)
    return known_device(connection, device)


def leave(connection: Connection, device: str, now: datetime) -> None:
    """The device's own wish to take part no longer."""
    devices.change_state(connection, device, "left")
    rounds.give_up(connection, device, now, "left", "it left the federation")
    record(connection, now, "device_left", device=device)


def admit(row: DeviceRow | None) -> DeviceRow:
    """Lets a device pass that takes part.

    Raises:
        Refusal: 403 `unknown_device`, `revoked`, `pending`.
    """
    row = _standing(row)
    if row.state == "pending":
        raise Refusal(403, "pending", "a person has yet to approve this device: fedloop device approve")
    return row


def known_device(connection: Connection, device: str) -> DeviceRow:
    """The device of this id.

    Raises:
        Refusal: 404 `not_found`.
    """
    row = devices.find(connection, device) if device.isprintable() else None
    if row is None:
        raise Refusal(404, "not_found", f"there is no device {device[:40]!r}")
    return row


def plain_text(text: str, what: str) -> str:
    """A name, a group or a serial number: printable, one line, not endless.

    Raises:
        Refusal: 422 `malformed`.
    """
    if not text.strip() or len(text) > TEXT_LIMIT or not text.isprintable():
        raise Refusal(
            422, "malformed", f"{what} is {text[:40]!r}, expected 1 to {TEXT_LIMIT} printable characters"
        )
    return text.strip()


_STATE_WORDS = {
    "pending": "pending",
    "active": "active",
    "revoked": "revoked",
    "left": "gone: it left by itself",
}


def _token(connection: Connection, authority: Authority, text: str) -> TokenRow:
    form, _, rest = text.partition(".")
    ca_sha256, _, secret = rest.partition(".")
    if form != TOKEN_FORM or not secret or not text.isascii():
        raise Refusal(403, "token_unknown", f"this is no enrolment token; one begins with {TOKEN_FORM}.")
    if not hmac.compare_digest(ca_sha256, authority.ca_sha256):
        raise Refusal(403, "token_unknown", "this token is for another coordinator")
    token = tokens.find(connection, _sha256(secret))
    if token is None:
        raise Refusal(
            403, "token_unknown", "this token was not made here; ask for a new one: fedloop device token"
        )
    return token


def _check_token(token: TokenRow, now: datetime) -> None:
    if token.uses_left < 1:
        raise Refusal(403, "token_used", "this token was used; ask for a new one: fedloop device token")
    if now >= token.expires_at:
        raise Refusal(
            403,
            "token_expired",
            f"this token expired at {token.expires_at.astimezone(UTC):%Y-%m-%d %H:%M UTC}; ask for a new one: "
            "fedloop device token",
        )


def _again(connection: Connection, device: DeviceRow) -> Enrolled:
    """The answer to a key that is known: it costs no use of a token."""
    if _standing(device).state == "pending":
        return _waiting(device.id)
    found = devices.latest_certificate(connection, device.key_sha256)
    if found is None:
        raise Refusal(403, "unknown_device", "this key's certificates ended long ago; enrol with a new key")
    return _answer(device.id, found[1])


def _new_device(
    connection: Connection,
    settings: Settings,
    token: TokenRow,
    request: EnrolRequest,
    key: str,
    now: datetime,
) -> DeviceRow:
    pending = token.needs_approval or settings.needs_approval
    serial = None if request.serial_number is None else plain_text(request.serial_number, "serial_number")
    return DeviceRow(
        id=str(uuid.uuid4()),
        name=plain_text(request.name, "name"),
        device_group=_group(connection, token, serial),
        serial_number=serial,
        state="pending" if pending else "active",
        token=token.id,
        key_sha256=key,
        csr=request.csr if pending else None,
        enrolled_at=now,
        certificate_until=None,
        last_seen_at=None,
        expected_at=None,
        report={},
    )


def _group(connection: Connection, token: TokenRow, serial: str | None) -> str:
    if not token.listed_serials_only:
        return token.device_group
    listed = None if serial is None else tokens.find_serial(connection, serial)
    if listed is None:
        raise Refusal(
            403,
            "serial_unknown",
            f"this token is for listed machines, and {serial or 'a machine without a serial number'} is not listed: "
            "fedloop device import",
        )
    return listed.device_group


def _take_token(connection: Connection, token: TokenRow, device: DeviceRow) -> None:
    if token.listed_serials_only:
        assert device.serial_number is not None  # looked up for the group
        if not tokens.use_serial(connection, device.serial_number, device.id):
            raise Refusal(
                403,
                "serial_used",
                f"a machine with the serial number {device.serial_number} enrolled before; give this one a token of its own: "
                "fedloop device token",
            )
    if not tokens.use(connection, token.id):
        raise Refusal(403, "token_used", "this token was used; ask for a new one: fedloop device token")


def _standing(device: DeviceRow | None) -> DeviceRow:
    if device is None:
        raise Refusal(403, "unknown_device", "this coordinator does not know this device; enrol again")
    if device.state == "revoked":
        raise Refusal(403, "revoked", "this device was revoked by an operator")
    if device.state == "left":
        raise Refusal(403, "unknown_device", "this device left the federation; enrol again to come back")
    return device


def _certificate(pem: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except Exception as error:  # whatever a parser may say about bytes from outside
        raise Refusal(422, "malformed", "`certificate` is not a certificate in PEM") from error


def _check_proof(shown: x509.Certificate, csr: x509.CertificateSigningRequest, proof: str) -> None:
    key = shown.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)  # no other is ever signed here
    try:
        signature = base64.b64decode(proof, validate=True)
        key.verify(signature, csr.public_bytes(serialization.Encoding.DER), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, binascii.Error, ValueError):
        raise Refusal(
            403, "bad_proof", "`proof` is not a signature over the request by the key of the certificate"
        ) from None


def _certified(connection: Connection, device: str, certificate: x509.Certificate) -> Enrolled:
    devices.add_certificate(connection, device, certificate)
    return _answer(device, certificate)


def _answer(device: str, certificate: x509.Certificate) -> Enrolled:
    return Enrolled(device, pki.pem_of(certificate), certificate.not_valid_after_utc.isoformat())


def _waiting(device: str) -> Enrolled:
    return Enrolled(device, "", "", _ASK_AGAIN_SECONDS)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
