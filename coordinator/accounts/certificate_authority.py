"""The coordinator's certificate authority, which issues the certificates of devices and of the coordinator itself.

A device is the holder of the key of a certificate with the URI `spiffe://fedloop/device/<id>` signed here. The
coordinator chooses the id: only the public key of a certificate request is used.

`<home>/pki` contains `ca.key` and `ca.pem` (10 years, created at the first start), `server.key` and `server.pem` (397 days,
renewed at two thirds of that, or when the names change). Keys are readable by their owner only.
"""

from __future__ import annotations

import ipaddress
import secrets
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.certificates import key_sha256, pem_of, read_file
from coordinator.errors import Refusal, UserError
from coordinator.settings import Settings
from edge_client.files import write_durably
from edge_client.transport.signatures import DEVICE_URI as DEVICE_URI
from edge_client.transport.signatures import BadCertificate, device_of

CA_LIFETIME = timedelta(days=3650)
SERVER_LIFETIME = timedelta(days=397)
BACKDATED = timedelta(minutes=5)
"""Clocks differ, so a certificate is valid from a little before its issue."""

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME. Python has no name for it."""

_PrivateKey = (
    ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey
)
_E = TypeVar("_E", bound=x509.ExtensionType)


@dataclass(frozen=True)
class Authority:
    """A CA certificate with its key, and the operations that use them. Thread-safe."""

    certificate: x509.Certificate
    _key: _PrivateKey
    _settings: Settings
    _clock: Callable[[], datetime]

    @staticmethod
    def open(settings: Settings, clock: Callable[[], datetime]) -> Authority:
        """The authority named in the settings, otherwise that of `settings.home`, created at the first start.

        Raises:
            UserError: the files of the CA are missing, do not match, or are not those of a CA.
        """
        folder = settings.home / "pki"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        certificate, key = _ca_paths(settings, folder, clock())
        authority = Authority(*_read_ca(certificate, key, clock()), settings, clock)
        authority._renew_server_certificate(clock())
        return authority

    @property
    def ca_pem(self) -> str:
        """The CA certificate in PEM, which devices pin."""
        return pem_of(self.certificate)

    @property
    def ca_sha256(self) -> str:
        """Hash of the CA certificate (DER), in hex; tokens carry it."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    def issue_device(
        self, csr: x509.CertificateSigningRequest, device_id: str, now: datetime
    ) -> x509.Certificate:
        """A certificate that identifies the holder of the request's key as this device.

        `csr` comes from `read_request`. Its subject and extensions are ignored.
        """
        until = min(now + self._settings.certificate_lifetime, self.certificate.not_valid_after_utc)
        return self._signed(
            _builder(csr.public_key(), device_id, now, until),
            [x509.UniformResourceIdentifier(DEVICE_URI + device_id)],
            ExtendedKeyUsageOID.CLIENT_AUTH,
        )

    def issue_relay(
        self, csr: x509.CertificateSigningRequest, names: Sequence[str], now: datetime
    ) -> x509.Certificate:
        """A certificate with which the holder of the request's key answers devices at these names."""
        until = min(now + SERVER_LIFETIME, self.certificate.not_valid_after_utc)
        return self._signed(
            _builder(csr.public_key(), "Fedloop relay", now, until),
            [general_name(name) for name in names],
            ExtendedKeyUsageOID.SERVER_AUTH,
        )

    @property
    def own_names(self) -> tuple[str, ...]:
        """Host names and addresses of the coordinator itself."""
        return self._settings.names

    def verify(self, certificate: x509.Certificate, now: datetime, grace: timedelta = timedelta()) -> str:
        """The id of the device that this certificate names. `grace`: as for `check_dates`. Proves no possession of the key.

        Raises:
            Refusal: 401 `foreign_certificate` (not issued here, or not a device's), `not_yet_valid` or `expired`.
        """
        self._check_signature(certificate)
        check_dates(certificate, now, grace)
        try:
            return device_of(certificate)
        except BadCertificate as error:
            raise Refusal(401, "foreign_certificate", str(error)) from None

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3 for the device API. A client certificate is requested but optional: enrolment has none.

        A certificate signed by another CA ends the handshake. OpenSSL does not check dates: a device with an expired
        certificate must get a response that tells it to renew, and time is injected.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_OPTIONAL
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an operator's CA may be an intermediate one
        context.verify_flags |= _NO_CHECK_TIME
        context.load_verify_locations(cadata=self.ca_pem)
        context.num_tickets = 0  # every connection shows its certificate
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._folder / "server.pem", self._folder / "server.key")
        return context

    def refresh_server_certificate(self, context: ssl.SSLContext, now: datetime) -> bool:
        """Renews the server's certificate if it is due, for connections from now on. To be called daily."""
        renewed = self._renew_server_certificate(now)
        if renewed:
            context.load_cert_chain(self._folder / "server.pem", self._folder / "server.key")
        return renewed

    @property
    def _folder(self) -> Path:
        return self._settings.home / "pki"

    def _renew_server_certificate(self, now: datetime) -> bool:
        if not self._server_certificate_due(now):
            return False
        key = ec.generate_private_key(ec.SECP256R1())
        names = [general_name(name) for name in self._settings.names]
        until = min(now + SERVER_LIFETIME, self.certificate.not_valid_after_utc)
        certificate = self._signed(
            _builder(key.public_key(), "Fedloop coordinator", now, until),
            names,
            ExtendedKeyUsageOID.SERVER_AUTH,
        )
        # The key is written first: after a crash in between, the next start notices that the two do not match.
        write_durably(self._folder / "server.key", _private_pem(key), mode=0o600)
        write_durably(self._folder / "server.pem", certificate.public_bytes(serialization.Encoding.PEM))
        return True

    def _server_certificate_due(self, now: datetime) -> bool:
        try:
            current = x509.load_pem_x509_certificate((self._folder / "server.pem").read_bytes())
            key = serialization.load_pem_private_key((self._folder / "server.key").read_bytes(), None)
            current.verify_directly_issued_by(self.certificate)
        except (OSError, ValueError, TypeError, InvalidSignature):
            return True
        names = _extension(current, x509.SubjectAlternativeName)
        lifetime = current.not_valid_after_utc - current.not_valid_before_utc
        return (
            key_sha256(key.public_key()) != key_sha256(current.public_key())
            or names is None
            or set(names) != {general_name(name) for name in self._settings.names}
            or not current.not_valid_before_utc <= now < current.not_valid_before_utc + lifetime * 2 / 3
        )

    def _signed(
        self, builder: x509.CertificateBuilder, names: list[x509.GeneralName], usage: x509.ObjectIdentifier
    ) -> x509.Certificate:
        hashed = isinstance(self._key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey)
        return (
            builder.issuer_name(self.certificate.subject)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(_authority_key(self.certificate), critical=False)
            .sign(self._key, hashes.SHA256() if hashed else None)
        )

    def _check_signature(self, certificate: x509.Certificate) -> None:
        usage = _extension(certificate, x509.ExtendedKeyUsage)
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            raise Refusal(
                401, "foreign_certificate", "this coordinator did not issue this certificate"
            ) from None
        if usage is None or ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
            raise Refusal(401, "foreign_certificate", "this is not a device's certificate")


def check_dates(certificate: x509.Certificate, now: datetime, grace: timedelta = timedelta()) -> None:
    """Requires that a certificate is valid now, or was or will be within `grace` of now.

    Raises:
        Refusal: 401 `not_yet_valid` or `expired`.
    """
    if now < certificate.not_valid_before_utc - grace:
        raise Refusal(
            401,
            "not_yet_valid",
            f"this certificate is valid from {_format_time(certificate.not_valid_before_utc)}, and the coordinator's clock "
            f"says {_format_time(now)}; one of the clocks is wrong",
        )
    if now > certificate.not_valid_after_utc + grace:
        raise Refusal(
            401,
            "expired",
            f"this certificate expired at {_format_time(certificate.not_valid_after_utc)}, and the coordinator's clock says "
            f"{_format_time(now)}; " + ("enrol again" if grace else "renew it"),
        )


def read_request(pem: str) -> x509.CertificateSigningRequest:
    """A certificate request for a P-256 key, signed with that key.

    Raises:
        Refusal: 422 `bad_csr`.
    """
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        key, signed = request.public_key(), request.is_signature_valid
    except Exception as error:  # a parser may raise anything on untrusted bytes
        raise Refusal(422, "bad_csr", "`csr` is not a certificate request in PEM") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Refusal(422, "bad_csr", "`csr` is not for a P-256 key")
    if not signed:
        raise Refusal(422, "bad_csr", "`csr` is not signed with its own key")
    return request


def _ca_paths(settings: Settings, folder: Path, now: datetime) -> tuple[Path, Path]:
    if settings.ca_certificate is not None and settings.ca_key is not None:
        return settings.ca_certificate, settings.ca_key
    if settings.ca_certificate is not None or settings.ca_key is not None:
        raise UserError("an operator's own CA needs both its certificate and its key; give both or none")
    certificate, key = folder / "ca.pem", folder / "ca.key"
    if not certificate.exists():
        # A key without a certificate is left over from an interrupted first start; nobody has seen its CA.
        _create_ca(certificate, key, now)
    return certificate, key


def _create_ca(certificate: Path, key: Path, now: datetime) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    # A unique name, so that the CAs of two coordinators are never confused.
    name = f"Fedloop CA {secrets.token_hex(4)}"
    signed = (
        _builder(private.public_key(), name, now, now + CA_LIFETIME)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .sign(private, hashes.SHA256())
    )
    write_durably(key, _private_pem(private), mode=0o600)
    write_durably(certificate, signed.public_bytes(serialization.Encoding.PEM))


def _read_ca(certificate: Path, key: Path, now: datetime) -> tuple[x509.Certificate, _PrivateKey]:
    try:
        read = x509.load_pem_x509_certificate(read_file(certificate))
    except ValueError:
        raise UserError(f"{certificate}: not a certificate in PEM") from None
    try:
        private = serialization.load_pem_private_key(read_file(key), None)
    except TypeError:
        raise UserError(
            f"{key}: the key is encrypted; give it decrypted, readable by its owner only"
        ) from None
    except ValueError:
        raise UserError(f"{key}: not a private key in PEM") from None
    if not isinstance(private, _PrivateKey):
        raise UserError(f"{key}: expected an EC, RSA or Ed25519 key")
    if key_sha256(private.public_key()) != key_sha256(read.public_key()):
        raise UserError(f"{key} is not the key of {certificate}")
    _check_ca(read, certificate, now)
    return read, private


def _check_ca(certificate: x509.Certificate, path: Path, now: datetime) -> None:
    constraints = _extension(certificate, x509.BasicConstraints)
    usage = _extension(certificate, x509.KeyUsage)
    if constraints is None or not constraints.ca or (usage is not None and not usage.key_cert_sign):
        raise UserError(f"{path}: not a CA certificate (CA:TRUE, with the right to sign certificates)")
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        raise UserError(
            f"{path}: valid from {_format_time(certificate.not_valid_before_utc)} to {_format_time(certificate.not_valid_after_utc)}, "
            f"and it is {_format_time(now)}; check the clock"
        )


def _builder(
    key: CertificatePublicKeyTypes, name: str, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _authority_key(certificate: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    identifier = _extension(certificate, x509.SubjectKeyIdentifier)
    if identifier is not None:
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    key = certificate.public_key()
    assert isinstance(
        key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey
    )
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def general_name(name: str) -> x509.GeneralName:
    """The host name or address in a certificate. Raises: UserError: it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise UserError(f"name {name!r}: expected a host name in ASCII (xn--… form) or an address") from None


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _extension(certificate: x509.Certificate, kind: type[_E]) -> _E | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return None


def _format_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
