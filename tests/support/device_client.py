"""A device made of a key, a socket and nothing else, to send a coordinator what no daemon of ours would.

`RawDevice` enrols as a device must, and from then on writes whatever bytes it is told into its TLS connection.
Requests that are well formed are put together by `request`; all others are bytes.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edge_client.wire import device as wire

ANSWER_SECONDS = 60.0
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "raw")])


class NoAnswer(Exception):
    """The connection ended without an answer."""


@dataclass(frozen=True)
class Answer:
    """What came back. `code`: of an error in the one form of both APIs; empty where the body has none."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        with suppress(ValueError, KeyError, TypeError):
            return str(self.document["error"]["code"])
        return ""


def request(
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Sequence[tuple[str, str]] = (),
    *,
    length: str | None = None,
) -> bytes:
    """One request of HTTP/1.1, as bytes. `path` below the device API's prefix; `length` may lie."""
    lines = [f"{method} {wire.PREFIX}{path} HTTP/1.1", "Host: localhost"]
    if body is not None:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


def message(document: Any) -> bytes:
    """A message of `edge_client.wire.device`, or any other JSON, as a body."""
    return json.dumps(
        wire.to_json(document) if hasattr(document, "__dataclass_fields__") else document
    ).encode()


@dataclass
class Line:
    """One TLS connection to a coordinator at a time, made anew when the old one ended."""

    url: str
    context: ssl.SSLContext
    connections: int = 0
    _socket: ssl.SSLSocket | None = None

    def send(self, content: bytes, *, hang_up: bool = False, method: str = "POST") -> Answer:
        """The answer to these bytes; `hang_up`: the device ends its side after them.

        Raises:
            NoAnswer: the connection ended before there was one.
        """
        fresh = self._socket is None
        try:
            return self._once(content, hang_up, method)
        except NoAnswer:
            if fresh or hang_up:
                raise
            return self._once(content, hang_up, method)  # an idle connection may be closed any time

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _once(self, content: bytes, hang_up: bool, method: str) -> Answer:
        try:
            connected = self._connected()
            with suppress(OSError):  # it may answer, and close, before it took all
                connected.sendall(content)
            if hang_up:
                self.close()
                raise NoAnswer("hung up")
            return self._read(connected, method)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise NoAnswer(repr(error)) from None

    def _read(self, connected: ssl.SSLSocket, method: str) -> Answer:
        response = http.client.HTTPResponse(connected, method=method)
        response.begin()
        body = response.read()
        if response.will_close:
            self.close()
        return Answer(response.status, body, {key.lower(): value for key, value in response.getheaders()})

    def _connected(self) -> ssl.SSLSocket:
        if self._socket is None:
            parts = urlsplit(self.url)
            plain = socket.create_connection((parts.hostname, parts.port), ANSWER_SECONDS)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = self.context.wrap_socket(plain, server_hostname=parts.hostname)
            self.connections += 1
        return self._socket


def line(url: str, ca_pem: str | None, folder: Path | None = None) -> Line:
    """A connection that trusts this CA (None: anybody), with the key and certificate in `folder`, if any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_pem is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=ca_pem)
    if folder is not None:
        context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return Line(url, context)


def fetched_ca(url: str) -> str:
    """The coordinator's CA, vouched for by nobody."""
    anybody = line(url, None)
    try:
        return anybody.send(request("GET", "/ca"), method="GET").body.decode()
    finally:
        anybody.close()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def csr(key: ec.EllipticCurvePrivateKey, name: x509.Name = _NAME) -> str:
    """A certificate request for this key, PEM."""
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def renewal(
    certificate: str, key: ec.EllipticCurvePrivateKey, next_key: ec.EllipticCurvePrivateKey
) -> wire.RenewRequest:
    """Asks for a certificate for the next key, vouched for by the old one."""
    wanted = csr(next_key)
    der = x509.load_pem_x509_csr(wanted.encode()).public_bytes(serialization.Encoding.DER)
    proof = base64.b64encode(key.sign(der, ec.ECDSA(hashes.SHA256()))).decode()
    return wire.RenewRequest(certificate, wanted, proof)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@dataclass
class RawDevice:
    """An enrolled device. Its key and certificate lie in `folder`."""

    id: str
    url: str
    ca_pem: str
    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: str

    def __post_init__(self) -> None:
        self.line = line(self.url, self.ca_pem, self.folder)

    @staticmethod
    def enrol(url: str, token: str, folder: Path, name: str = "raw") -> RawDevice:
        """A new device of this token.

        Raises:
            AssertionError: it was refused.
        """
        ca_pem, key = fetched_ca(url), new_key()
        stranger = line(url, ca_pem)
        try:
            requested = wire.EnrolRequest(token, csr(key), name)
            answer = stranger.send(request("POST", "/enrol", message(requested)))
        finally:
            stranger.close()
        assert answer.status == 200, answer
        enrolled = answer.document
        return RawDevice.kept(enrolled["device"], url, ca_pem, folder, key, enrolled["certificate"])

    @staticmethod
    def kept(
        device: str, url: str, ca_pem: str, folder: Path, key: ec.EllipticCurvePrivateKey, certificate: str
    ) -> RawDevice:
        """A device with this certificate, written to `folder`, as TLS reads it from there."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "key.pem").write_bytes(private_pem(key))
        (folder / "certificate.pem").write_text(certificate)
        return RawDevice(device, url, ca_pem, folder, key, certificate)

    def send(self, content: bytes, *, hang_up: bool = False, method: str = "POST") -> Answer:
        return self.line.send(content, hang_up=hang_up, method=method)

    def post(self, path: str, document: Any) -> Answer:
        return self.send(request("POST", path, message(document)))

    def get(self, path: str, headers: Sequence[tuple[str, str]] = ()) -> Answer:
        return self.send(request("GET", path, None, headers), method="GET")

    def check_in(self, checkin_message: wire.CheckIn) -> Answer:
        return self.post("/checkin", checkin_message)

    def task(self, checkin_message: wire.CheckIn, seconds: float = 90.0) -> dict[str, Any]:
        """The offer of a task, as soon as there is one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer = self.check_in(checkin_message)
            assert answer.status == 200, answer
            if answer.document["task"] is not None:
                offer: dict[str, Any] = answer.document["task"]
                return offer
            if not checkin_message.wait_seconds or not answer.document["hold"]:
                time.sleep(0.2)  # told to come back later; nothing tells when it is worth it
        raise AssertionError("no task came")

    def announce(self, task: str, payload: bytes, **changed: Any) -> Answer:
        start = wire.UploadStart(len(payload), hashlib.sha256(payload).hexdigest(), len(payload))
        return self.post(f"/tasks/{task}/upload", {**wire.to_json(start), **changed})

    def piece(self, task: str, piece: bytes, offset: int = 0) -> Answer:
        return self.send(request("PUT", f"/tasks/{task}/upload?offset={offset}", piece))

    def upload(self, task: str, payload: bytes, **changed: Any) -> Answer:
        """Announces and sends all of it; the first refusal, or the last answer."""
        answer = self.announce(task, payload, **changed)
        if answer.status != 200 or answer.document["accepted"]:
            return answer
        return self.piece(task, payload)

    def close(self) -> None:
        self.line.close()


def checkin(dataset: str, *, wait_seconds: float = 0.0, **changed: Any) -> wire.CheckIn:
    """What a device says that trains `dataset` with torch, or claims so."""
    checkin_message: dict[str, Any] = {
        "wire": f"{wire.WIRE[0]}.{wire.WIRE[1]}",
        "software": "raw",
        "runtimes": {"torch": "2.0"},
        "memory_bytes": 2**30,
        "datasets": {dataset: 10},
        "models": ("logreg",),
        "wait_seconds": wait_seconds,
    }
    return wire.CheckIn(**checkin_message | changed)
