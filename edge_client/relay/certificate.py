"""The certificate with which a relay answers its devices: its key stays here, the coordinator signs and chooses the names.

<state>/relay/server.key, server.pem      renewed at two thirds of the certificate's life
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edge_client.files import write_durably
from edge_client.transport.failures import Unreachable
from edge_client.transport.link import Link, parse_answer
from edge_client.wire.relays import Certificate, CertificateRequest

_RENEW_FROM = 2 / 3


@dataclass(frozen=True)
class ServerCertificate:
    """In `folder`; signed by the CA in `ca_pem`."""

    folder: Path
    ca_pem: str

    def is_due(self, now: float) -> bool:
        """Whether a new one is needed. `now`: seconds since 1970."""
        current = self._load()
        if current is None:
            return True
        begin, end = (
            each.timestamp() for each in (current.not_valid_before_utc, current.not_valid_after_utc)
        )
        return not begin <= now < begin + (end - begin) * _RENEW_FROM

    def renew(self, link: Link) -> None:
        """Gets one for a new key. Raises: ServerRefused: 403 `no_relay` and others; Unreachable."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "relay")])
        csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
        request = CertificateRequest(csr.public_bytes(serialization.Encoding.PEM).decode("ascii"))
        answer = parse_answer(Certificate, link.post("/relay/certificate", request))
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        # The key first: after a crash in between the two do not match, and the next start gets another.
        write_durably(self.folder / "server.key", pem, mode=0o600)
        write_durably(self.folder / "server.pem", answer.certificate.encode("ascii"))
        if self._load() is None:
            raise Unreachable("the coordinator's certificate for this relay is invalid")

    def name(self) -> str:
        """The first host name or address that it is for."""
        certificate = self._load()
        assert certificate is not None
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return str(next(iter(names)).value)

    def context(self) -> ssl.SSLContext:
        """TLS 1.3 for devices of the fleet. A client certificate is optional: who enrols has none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_OPTIONAL
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an operator's CA may be an intermediate one
        context.load_verify_locations(cadata=self.ca_pem)
        context.num_tickets = 0  # every connection shows its certificate
        context.set_alpn_protocols(["http/1.1"])
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Uses it for connections from now on."""
        context.load_cert_chain(self.folder / "server.pem", self.folder / "server.key")

    def _load(self) -> x509.Certificate | None:
        """The certificate on disk; None if there is none that fits the key and the CA."""
        try:
            certificate = x509.load_pem_x509_certificate((self.folder / "server.pem").read_bytes())
            key = serialization.load_pem_private_key((self.folder / "server.key").read_bytes(), None)
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(self.ca_pem.encode()))
        except (OSError, ValueError, TypeError, InvalidSignature):
            return None
        return certificate if key.public_key() == certificate.public_key() else None
