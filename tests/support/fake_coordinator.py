"""A coordinator in memory that speaks the device API over real TLS: small, single-minded, and easy to break.

It keeps what devices sent and does as it is told: offers the tasks in `tasks`, cuts an upload, refuses a path.
"""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import tempfile
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edge_client.wire import device as wire
from edge_client.wire.strict import parse_message

PEM = serialization.Encoding.PEM
SPIFFE = "spiffe://fedloop/device/"


class Authority:
    """A CA that signs whatever it is given. `days`: (from, to), relative to now."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        self.certificate = self._sign(self.name, self.key.public_key(), (-1.0, 3650.0), ca=True)

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(PEM).decode()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.certificate.public_bytes(serialization.Encoding.DER)).hexdigest()

    def server(self, days: tuple[float, float]) -> bytes:
        """Certificate and key of a server on this machine, PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName("localhost")]
        certificate = self._sign(_name("localhost"), key.public_key(), days, names)
        private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return certificate.public_bytes(PEM) + private

    def device(self, public_key: Any, device: str, days: tuple[float, float]) -> str:
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(SPIFFE + device)]
        return self._sign(_name(device), public_key, days, names).public_bytes(PEM).decode()

    def _sign(
        self,
        subject: x509.Name,
        public_key: Any,
        days: tuple[float, float],
        names: list[x509.GeneralName] | None = None,
        *,
        ca: bool = False,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=days[0]))
            .not_valid_after(now + timedelta(days=days[1]))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .add_extension(
                x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False), critical=True
            )
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())


@dataclass
class FakeCoordinator:
    """Set the first group before or while it runs, read the second.

    `releases`: folder of a repository. `tampered`: path below `/releases/` -> what comes instead, of what is there.
    """

    server_days: tuple[float, float] = (-1.0, 365.0)
    device_days: tuple[float, float] = (-0.01, 30.0)
    approvals_missing: int = 0
    tasks: list[wire.TaskOffer] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut_upload_at: int | None = None
    cut_download_at: int | None = None
    hold: bool = False
    stop: bool = False
    next_seconds: float = 0.0
    offers: tuple[wire.ReleaseOffer, ...] = ()
    releases: Path | None = None
    tampered: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    knows_ranges: bool = True
    cut_release_at: int | None = None

    authority: Authority = field(default_factory=Authority)
    url: str = ""
    devices: dict[bytes, str] = field(default_factory=dict)
    checkins: list[tuple[str, wire.CheckIn]] = field(default_factory=list)
    received: dict[str, bytearray] = field(default_factory=dict)
    started: dict[str, dict[str, Any]] = field(default_factory=dict)
    accepted: dict[str, bytes] = field(default_factory=dict)
    acceptances: list[str] = field(default_factory=list)
    declined: dict[str, wire.Decline] = field(default_factory=dict)
    renewals: int = 0
    ranges: list[str] = field(default_factory=list)
    served: list[tuple[str, int]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def token(self) -> str:
        return f"fl1.{self.authority.sha256}.c2VjcmV0"

    def add_blob(self, content: bytes) -> wire.BlobRef:
        digest = hashlib.sha256(content).hexdigest()
        self.blobs[digest] = content
        return wire.BlobRef(digest, len(content))

    def offer(self, **changes: Any) -> wire.TaskOffer:
        """Queues a train task on data `digits` for the litert runtime, changed as told."""
        params = self.add_blob(b"params " * 10_000)
        artifact, manifest = self.add_blob(b"artifact"), self.add_blob(b"manifest")
        values: dict[str, Any] = {
            "task": str(uuid.uuid4()),
            "kind": "train",
            "run": "11111111-2222-3333-4444-555555555555",
            "run_name": "demo",
            "round": 1,
            "runtime": "litert",
            "dataset": "digits",
            "message": {},
            "model": wire.ModelRef("cnn", {}, (1, 8, 8), 10, "float32", "classification"),
            "params": params,
            "streams": None,
            "artifact": artifact,
            "manifest": manifest,
            "lease_seconds": 60.0,
            "deadline_seconds": 600.0,
            "result_limit_bytes": 1 << 30,
        }
        offer = wire.TaskOffer(**{**values, **changes})
        self.tasks.append(offer)
        return offer

    def wait_for(self, condition: Any, seconds: float = 60.0) -> None:
        """Until `condition()` holds; looked at after each request."""
        with self.changed:
            assert self.changed.wait_for(condition, seconds), "it never came to that"

    @contextmanager
    def running(self) -> Iterator[FakeCoordinator]:
        handler = type("Handler", (_Handler,), {"fake": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        server.socket = self._context().wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = f"https://localhost:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(self.authority.server(self.server_days))
            context.load_cert_chain(file.name)
        context.load_verify_locations(cadata=self.authority.pem)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context


class _Refused(Exception):
    def __init__(self, status: int, code: str, **details: Any) -> None:
        super().__init__(code)
        self.status, self.code, self.details = status, code, details


class _Cut(Exception):
    """The line breaks here."""


class _Handler(BaseHTTPRequestHandler):
    fake: FakeCoordinator
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its headers

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_GET  # noqa: N815 - the base class's names

    def _serve(self) -> None:
        path = urlsplit(self.path)
        try:
            body = self._body(path.path)
            with self.fake.changed:
                try:
                    status, content = self._answer(path.path.removeprefix(wire.PREFIX), path.query, body)
                finally:
                    self.fake.changed.notify_all()
        except _Refused as refused:
            status = refused.status
            document = {"error": {"code": refused.code, "message": f"says {refused.code}", **refused.details}}
            content = json.dumps(document).encode()
        except _Cut:
            self.connection.close()
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.fake.cut_download_at is not None and "/blobs/" in self.path:
            content, self.fake.cut_download_at = content[: self.fake.cut_download_at], None
            self.close_connection = True
        if self.fake.cut_release_at is not None and self.path.endswith(".tflite"):
            content, self.fake.cut_release_at = content[: self.fake.cut_release_at], None
            self.close_connection = True
        self.wfile.write(content)

    def _body(self, path: str) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        fake = self.fake
        if self.command == "PUT" and fake.cut_upload_at is not None:
            part = self.rfile.read(min(length, fake.cut_upload_at))
            fake.cut_upload_at = None
            fake.received[path.split("/")[-2]] += part
            raise _Cut
        return self.rfile.read(length)

    def _answer(self, path: str, query: str, body: bytes) -> tuple[int, bytes]:
        for beginning, (status, code) in self.fake.refusals.items():
            if path.startswith(beginning):
                raise _Refused(status, code)
        if path == "/ca":
            return 200, self.fake.authority.pem.encode()
        if path == "/enrol":
            return 200, self._enrol(json.loads(body))
        if path == "/renew":
            return 200, self._renew(json.loads(body))
        device = self._device()
        if path == "/checkin":
            return 200, self._check_in(device, json.loads(body))
        if path == "/leave":
            self.fake.left.append(device)
            return 200, b"{}"
        if path.startswith("/releases/"):
            return self._release(path.removeprefix("/releases/"))
        if path.startswith("/blobs/"):
            return self._blob(path.removeprefix("/blobs/"))
        _, _, task, what = path.split("/")
        return 200, self._task(task, what, query, body)

    def _device(self) -> str:
        der = self.connection.getpeercert(True)  # type: ignore[attr-defined]
        if der is None:
            raise _Refused(401, "no_certificate")
        names = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
        uri = str(names.value.get_values_for_type(x509.UniformResourceIdentifier)[0])
        return uri.removeprefix(SPIFFE)

    def _enrol(self, request: dict[str, Any]) -> bytes:
        fake = self.fake
        if request["token"] != fake.token:
            raise _Refused(403, "token_unknown")
        csr = x509.load_pem_x509_csr(request["csr"].encode())
        key = csr.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        device = fake.devices.setdefault(key, str(uuid.uuid4()))
        if fake.approvals_missing > 0:
            fake.approvals_missing -= 1
            return _json(wire.Enrolled(device, "", "", 1.5))
        return self._certificate(csr, device)

    def _renew(self, request: dict[str, Any]) -> bytes:
        old = x509.load_pem_x509_certificate(request["certificate"].encode())
        csr = x509.load_pem_x509_csr(request["csr"].encode())
        public = old.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        der = csr.public_bytes(serialization.Encoding.DER)
        public.verify(base64.b64decode(request["proof"]), der, ec.ECDSA(hashes.SHA256()))
        assert csr.public_key() != public
        self.fake.renewals += 1
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        device = names.get_values_for_type(x509.UniformResourceIdentifier)[0].removeprefix(SPIFFE)
        return self._certificate(csr, device)

    def _certificate(self, csr: x509.CertificateSigningRequest, device: str) -> bytes:
        pem = self.fake.authority.device(csr.public_key(), device, self.fake.device_days)
        return _json(wire.Enrolled(device, pem, ""))

    def _check_in(self, device: str, document: dict[str, Any]) -> bytes:
        fake = self.fake
        message = parse_message(wire.CheckIn, document, "check-in")
        fake.checkins.append((device, message))
        fake.changed.notify_all()
        if message.working_on is not None:
            return _json(wire.CheckInAnswer("1.3", fake.next_seconds, stop=fake.stop, releases=fake.offers))
        if message.wait_seconds and not fake.tasks:
            fake.changed.wait_for(lambda: bool(fake.tasks), min(message.wait_seconds, 1.0))
        task = fake.tasks.pop(0) if fake.tasks and not message.ineligible else None
        return _json(
            wire.CheckInAnswer("1.3", fake.next_seconds, task=task, hold=fake.hold, releases=fake.offers)
        )

    def _blob(self, digest: str) -> tuple[int, bytes]:
        if digest not in self.fake.blobs:
            raise _Refused(404, "not_found")
        wanted = self.headers.get("Range")
        if wanted is None:
            return 200, self.fake.blobs[digest]
        self.fake.ranges.append(wanted)
        return 206, self.fake.blobs[digest][int(wanted.removeprefix("bytes=").removesuffix("-")) :]

    def _release(self, path: str) -> tuple[int, bytes]:
        fake = self.fake
        found = (
            None
            if fake.releases is None
            else fake.releases / ("metadata/1.root.json" if path == "root" else path)
        )
        if found is None or not found.is_file():
            raise _Refused(404, "not_found")
        content = found.read_bytes()
        if path in fake.tampered:
            content = fake.tampered[path](content)
        first, _, last = (self.headers.get("Range") or "bytes=-").removeprefix("bytes=").partition("-")
        full = not (first or last) or not fake.knows_ranges
        content = content if full else content[int(first) : int(last) + 1 if last else None]
        fake.served.append((path, len(content)))
        return 200 if full else 206, content

    def _task(self, task: str, what: str, query: str, body: bytes) -> bytes:
        fake = self.fake
        if what == "decline":
            fake.declined[task] = wire.Decline(**json.loads(body))
            return b"{}"
        if what in ("evaluation", "statistics"):
            fake.accepted[task] = body
            fake.acceptances.append(task)
            return b"{}"
        if self.command == "POST":
            fake.started[task] = json.loads(body)
            fake.received.setdefault(task, bytearray())
        else:
            offset = int(parse_qs(query)["offset"][0])
            if offset != len(fake.received[task]):
                raise _Refused(409, "upload_offset", offset=len(fake.received[task]))
            fake.received[task] += body
        return self._progress(task)

    def _progress(self, task: str) -> bytes:
        fake = self.fake
        have, start = fake.received[task], fake.started[task]
        if len(have) < start["size_bytes"]:
            return _json(wire.UploadState(len(have)))
        if hashlib.sha256(have).hexdigest() != start["sha256"]:
            raise _Refused(422, "hash_mismatch")
        fake.accepted[task] = zlib.decompress(have) if start["encoding"] == "deflate" else bytes(have)
        fake.acceptances.append(task)
        return _json(wire.UploadState(len(have), accepted=True))


def _json(message: Any) -> bytes:
    return json.dumps(wire.to_json(message)).encode()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
