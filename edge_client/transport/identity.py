"""The device's identity: a key that never leaves it, a certificate, and the one CA it trusts.

    enrol    the token carries the SHA-256 of the coordinator's CA. The CA is fetched without verification
             and used only if it has that hash; everything else goes over a connection that this CA verifies.
    renew    at two thirds of the certificate's life, with jitter: a new key, signed for by the old one.

On disk, so that a crash anywhere leaves the complete old or the complete new identity:

    identity -> identities/<n>/    key.pem  certificate.pem  ca.pem  server.json
    identities/<n+1>/key.pem       durable before its public key is sent; used again after a crash

A folder is complete before one rename of the link makes it the identity; folders with lower numbers are garbage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edge_client.errors import UserError
from edge_client.files import sync_folder, write_durably
from edge_client.transport.failures import Unreachable, WrongClock
from edge_client.transport.link import (
    Credentials,
    Link,
    describe_wrong_clock,
    parse_answer,
    pinned_context,
    unverified_ca,
)
from edge_client.wire.device import Enrolled, EnrolRequest, RenewRequest

RENEW_FROM, RENEW_SPREAD = 2 / 3, 0.1
"""Share of the certificate's life after which it is renewed, and the largest jitter added to it, per device."""


@dataclass(frozen=True)
class Identity:
    """A complete identity on disk. Times are seconds since 1970."""

    folder: Path
    device: str
    url: str
    name: str
    ca_pem: str
    not_before: float
    not_after: float
    fingerprint: str

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.folder / "certificate.pem", self.folder / "key.pem")

    @property
    def renew_at(self) -> float:
        """Constant for one certificate; the jitter spreads devices that enrolled together."""
        jitter = int(self.fingerprint[:8], 16) / 2**32 * RENEW_SPREAD
        return self.not_before + (self.not_after - self.not_before) * (RENEW_FROM + jitter)


def enrol(
    state_dir: Path,
    url: str,
    token: str,
    *,
    name: str,
    serial_number: str | None = None,
    proxy: str = "",
    wait: Callable[[float], None],
) -> Identity:
    """Enrols this device with the coordinator at `url`; may be repeated after any interruption.

    Args:
        wait: waits so many seconds while approval is pending.

    Raises:
        UserError: the token is invalid, or not of the coordinator at `url`.
        ServerRefused: the token is used up, expired or not for this machine.
        Unreachable: there is no answer.
    """
    ca_sha256 = _ca_sha256(token)
    if not url.startswith("https://"):
        raise UserError(
            f"the coordinator's address is {url!r}, expected https://HOST:PORT, as `fedloop device token` prints it"
        )
    ca_pem = _verified_ca(unverified_ca(url, proxy), ca_sha256, url)
    next_folder = _prepare_next(state_dir)
    request = EnrolRequest(token.strip(), _csr(_key(next_folder), name), name, serial_number)
    try:
        with closing(Link(url, pinned_context(ca_pem), proxy=proxy)) as link:
            while not (answer := parse_answer(Enrolled, link.post("/enrol", request))).certificate:
                wait(max(1.0, answer.retry_seconds))
    except WrongClock as error:
        raise Unreachable(
            f"{describe_wrong_clock(error, url, time.time(), proxy)}, then enroll again"
        ) from None
    return _commit(state_dir, answer, next_folder, url=url, name=name, ca_pem=ca_pem)


def renew(
    state_dir: Path, identity: Identity, *, expired: bool, proxy: str = "", relay: str = ""
) -> Identity:
    """Renews the certificate, for a new key. An expired one is not presented in TLS, which would refuse it. `relay`: its URL, to go through.

    Raises:
        ServerRefused: 403 `revoked` and others.
        Unreachable: try again later; the identity is unchanged.
    """
    next_folder = _prepare_next(state_dir)
    csr = _csr(_key(next_folder), identity.name)
    certificate = identity.credentials.certificate.read_text("ascii")
    request = RenewRequest(certificate, csr, _proof(identity, csr))
    presented = None if expired else identity.credentials
    url = relay or identity.url
    with closing(Link(url, pinned_context(identity.ca_pem, presented), proxy=proxy)) as link:
        answer = parse_answer(Enrolled, link.post("/renew", request))
    return _commit(
        state_dir, answer, next_folder, url=identity.url, name=identity.name, ca_pem=identity.ca_pem
    )


def load(state_dir: Path) -> Identity | None:
    """The identity in `state_dir`, or None before enrolment.

    Raises:
        UserError: the identity is damaged.
    """
    link = state_dir / "identity"
    while link.exists():
        folder = link.resolve()
        try:
            return _read(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if link.resolve() == folder:
                raise UserError(
                    f"the identity in {folder} cannot be read: {error}; `fedloop-edge leave` removes it, then enroll again"
                ) from None
            # A daemon renewed it meanwhile: read the new one.
    return None


def _read(folder: Path) -> Identity:
    server = json.loads((folder / "server.json").read_text("utf-8"))
    certificate = x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())
    return Identity(
        folder=folder,
        device=server["device"],
        url=server["url"],
        name=server["name"],
        ca_pem=(folder / "ca.pem").read_text("ascii"),
        not_before=certificate.not_valid_before_utc.timestamp(),
        not_after=certificate.not_valid_after_utc.timestamp(),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def wipe(state_dir: Path) -> None:
    """Deletes key, certificate and coordinator.

    One rename removes all of it: a key left behind by a crash would enrol again as the device that left.
    """
    gone = state_dir / "identities.gone"
    shutil.rmtree(gone, ignore_errors=True)
    if (state_dir / "identities").exists():
        (state_dir / "identities").rename(gone)
    (state_dir / "identity").unlink(missing_ok=True)
    shutil.rmtree(gone, ignore_errors=True)
    sync_folder(state_dir)


def _ca_sha256(token: str) -> str:
    """The CA's SHA-256 in a token."""
    parts = token.strip().split(".")
    expected = "expected fl1.HASH.SECRET, as `fedloop device token` prints it"
    if len(parts) != 3 or parts[0] != "fl1":
        raise UserError(
            f"the enrolment token has {len(parts)} parts and begins with {parts[0][:4]!r}; {expected}"
        )
    if len(parts[1]) != 64 or not set(parts[1]) <= set("0123456789abcdef"):
        raise UserError(f"the enrolment token's second part is not a SHA-256; {expected}")
    return parts[1]


def _verified_ca(pem: bytes, ca_sha256: str, url: str) -> str:
    try:
        ca = x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise Unreachable(
            f"{url} sends no CA certificate; is that the device API of a coordinator?"
        ) from None
    digest = hashlib.sha256(ca.public_bytes(serialization.Encoding.DER)).hexdigest()
    if not secrets.compare_digest(digest, ca_sha256):
        raise UserError(
            f"the coordinator at {url} has the CA {digest[:16]}…, the token is for {ca_sha256[:16]}…; "
            "somebody intercepts the connection, or the token is of another coordinator. Nothing was stored"
        )
    return ca.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _prepare_next(state_dir: Path) -> Path:
    """The folder of the next identity, with a durable key. A key left by a crash is used again."""
    link = state_dir / "identity"
    number = int(link.resolve().name) + 1 if link.exists() else 1
    folder = state_dir / "identities" / str(number)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "key.pem"
    if not path.exists():
        pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_durably(path, pem, mode=0o600)
        sync_folder(folder.parent)
        sync_folder(state_dir)
    return folder


def _key(folder: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _csr(key: ec.EllipticCurvePrivateKey, name: str) -> str:
    """The coordinator uses only the public key; the name is for people."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name.strip()[:64] or "device")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _proof(identity: Identity, csr: str) -> str:
    der = x509.load_pem_x509_csr(csr.encode()).public_bytes(serialization.Encoding.DER)
    return base64.b64encode(_key(identity.folder).sign(der, ec.ECDSA(hashes.SHA256()))).decode("ascii")


def _commit(state_dir: Path, answer: Enrolled, folder: Path, *, url: str, name: str, ca_pem: str) -> Identity:
    """Completes `folder`, which has the key, and makes it the identity."""
    _check_certificate(answer.certificate, _key(folder), ca_pem)
    write_durably(folder / "certificate.pem", answer.certificate.encode("ascii"))
    write_durably(folder / "ca.pem", ca_pem.encode("ascii"))
    server = {"device": answer.device, "url": url.rstrip("/"), "name": name}
    write_durably(folder / "server.json", json.dumps(server).encode())
    link = state_dir / ".identity.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(Path("identities") / folder.name)
    link.replace(state_dir / "identity")
    sync_folder(state_dir)
    for other in folder.parent.iterdir():
        if other.name != folder.name:
            shutil.rmtree(other, ignore_errors=True)
    identity = load(state_dir)
    assert identity is not None
    return identity


def _check_certificate(pem: str, key: ec.EllipticCurvePrivateKey, ca_pem: str) -> None:
    """Rejects a certificate for another key or by another CA: it would lock the device out."""
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem.encode()))
    except Exception as error:  # ValueError, TypeError, InvalidSignature
        raise Unreachable(f"the coordinator's certificate for this device is invalid: {error!r}") from None
    if certificate.public_key() != key.public_key():
        raise Unreachable("the coordinator's certificate is for another key than this device's")
