"""A coordinator's device API behind real TLS on loopback, and the keys and requests of devices at its door.

The clock is the test's. The server is uvicorn with the protocol and the TLS context that `fedloop serve` uses.
"""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coordinator.accounts import enrolment_tokens
from coordinator.accounts.certificate_authority import Authority
from coordinator.accounts.enrolment_tokens import TokenTerms
from coordinator.context.services import Services
from coordinator.context.signals import Signals
from coordinator.db.store import Database
from coordinator.server.app import device_app
from coordinator.server.http_protocol import DeviceProtocol
from coordinator.server.metrics import Metrics
from coordinator.settings import Settings
from coordinator.storage.blobs import Blobs
from edge_client.wire.device import PREFIX, EnrolRequest, RenewRequest, to_json

START = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def pass_days(self, days: float) -> None:
        self.now += timedelta(days=days)


@dataclass
class Door:
    """Services, their clock, and where the device API listens (empty: nowhere)."""

    services: Services
    clock: Clock
    url: str = ""

    def token(self, **terms: Any) -> str:
        """The text of a new token; a single use, 15 minutes, group `default` unless told."""
        chosen = TokenTerms(**{"uses": 1, **terms})
        _, text = self.services.database.write(
            lambda at: enrolment_tokens.create_token(at, self.services.authority, chosen, self.clock())
        ).result()
        return text

    def call(
        self, method: str, path: str, body: Any = None, *, device: Device | None = None, **headers: str
    ) -> httpx.Response:
        """One request over a connection of its own, with the device's certificate if there is one."""
        context = ssl.create_default_context(cadata=self.services.authority.ca_pem)
        if device is not None:
            device.show_in(context)
        with httpx.Client(verify=context, base_url=self.url + PREFIX, timeout=60) as client:
            return client.request(method, path, json=body, headers=headers)

    def enrol(self, device: Device, token: str | None = None, **changed: Any) -> httpx.Response:
        message = EnrolRequest(token or self.token(), device.csr(), device.name)
        answer = self.call("POST", "/enrol", to_json(replace(message, **changed)))
        if answer.is_success:
            device.certificate = answer.json()["certificate"]
            device.id = answer.json()["device"]
        return answer


class Device:
    """A key, and the certificate it got."""

    def __init__(self, folder: Path, name: str = "gateway") -> None:
        self.folder = folder
        self.name = name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = ""
        self.id = ""

    def csr(self, **changed: Any) -> str:
        return request_for(self.key, **changed)

    def renewal(self, next_key: ec.EllipticCurvePrivateKey, **changed: Any) -> dict[str, Any]:
        """The body of a renewal to the next key; `changed` are keys of it."""
        csr = request_for(next_key)
        der = x509.load_pem_x509_csr(csr.encode()).public_bytes(serialization.Encoding.DER)
        proof = base64.b64encode(self.key.sign(der, ec.ECDSA(hashes.SHA256()))).decode()
        return to_json(RenewRequest(self.certificate, csr, proof)) | changed

    def show_in(self, context: ssl.SSLContext) -> None:
        """Has TLS connections show the certificate."""
        file = self.folder / f"{id(self)}.pem"
        file.write_text(self.certificate + key_pem(self.key))
        context.load_cert_chain(file)


def request_for(key: Any, *, names: tuple[x509.GeneralName, ...] = (), subject: str = "anything") -> str:
    """A certificate request, PEM."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def key_pem(key: Any) -> str:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem.decode()


def door(folder: Path, database: Database, **settings: Any) -> Door:
    """The services of a coordinator whose home is `folder`, over a database with its tables; nothing listens."""
    clock = Clock()
    folder.mkdir(exist_ok=True)
    chosen = Settings(home=folder, database_url=str(database.engine.url), **settings)
    authority = Authority.open(chosen, clock)
    return Door(Services(chosen, database, Blobs(folder / "blobs"), Signals(), authority, clock), clock)


@contextmanager
def open_door(folder: Path, database: Database, **settings: Any) -> Iterator[Door]:
    """The same, listening."""
    made = door(folder, database, **settings)
    app = device_app(made.services, Metrics(database, made.services.signals))
    context = made.services.authority.server_context()
    with listening(app, ssl_context_factory=lambda config, default: context) as port:
        made.url = f"https://localhost:{port}"
        yield made


@contextmanager
def listening(app: Any, **options: Any) -> Iterator[int]:
    """Serves an application on a free port of loopback."""
    config = uvicorn.Config(
        app, http=DeviceProtocol, proxy_headers=False, log_config=None, lifespan="off", **options
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal."""
    document: Mapping[str, Any] = answer.json()
    return answer.status_code, str(document["error"]["code"])
