"""The relay's HTTPS server: the device API, to devices with a certificate of the fleet's CA.

Everything is forwarded to the coordinator but uploads that the relay keeps, and blobs that it has fetched before. A device is whoever its
certificate says; the coordinator decides whether it belongs to this relay and is still a member.

One thread for each connection, since most of them wait for the coordinator.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import urllib3

from edge_client.relay.intermediary import Body, Intermediary, error_body
from edge_client.relay.uploads import Uploads
from edge_client.transport.failures import ServerRefused, Unreachable
from edge_client.transport.signatures import DEVICE_URI
from edge_client.wire.device import PREFIX, BlobRef, CheckInAnswer, UploadStart, to_json
from edge_client.wire.strict import InvalidDocument, loads, parse_message, require_bounded

MAX_CONNECTIONS = 2048
HANDSHAKE_SECONDS = 15.0
STALL_SECONDS = 60.0
"""Silence after which a connection is closed."""

RETRY_SECONDS = 5
_MESSAGE_BYTES = 2**17
_ANONYMOUS_BYTES = 16 * 1024
_ANSWER_BYTES = 1024 * 1024
_PIECE_BYTES = 2**30
_BLOCK_BYTES = 2**16
_DRAIN_BYTES = 2**20
_DRAIN_SECONDS = 5.0
_LONGEST_HOLD_SECONDS = 60.0
_FORWARDED_UP = ("range", "if-none-match")
_FORWARDED_DOWN = ("content-type", "etag", "cache-control", "content-range", "retry-after", "date")

_ID = r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}"
_ANONYMOUS = (("GET", "/ca"), ("POST", "/enrol"), ("POST", "/renew"))
_UPLOAD = re.compile(rf"/tasks/({_ID})/upload")
_BLOB = re.compile(r"/blobs/([0-9a-f]{64})")
_FORWARDED = re.compile(
    rf"/leave|/tasks/{_ID}/(evaluation|statistics|decline|secure)|/releases/[0-9A-Za-z_.\-/]+"
)


class RelayServer(ThreadingHTTPServer):
    """Serves until `shutdown`. `context`: TLS settings, whose certificate may be replaced meanwhile."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], context: ssl.SSLContext, intermediary: Intermediary, uploads: Uploads
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.intermediary = intermediary
        self.uploads = uploads
        self.offered = Offered()
        self._context = context
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(HANDSHAKE_SECONDS)
        with self._context.wrap_socket(request, server_side=True) as connection:
            connection.settimeout(STALL_SECONDS)
            _Handler(connection, client_address, self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no news."""


class Offered:
    """Which blobs each device was offered, so that it may fetch them here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blobs: dict[str, dict[str, BlobRef]] = {}

    def note(self, device: str, answer: CheckInAnswer) -> None:
        if answer.task is not None:
            with self._lock:
                self._blobs[device] = {ref.sha256: ref for ref in answer.task.blobs}

    def find(self, device: str, sha256: str) -> BlobRef | None:
        with self._lock:
            return self._blobs.get(device, {}).get(sha256)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fedloop-relay", ""

    @property
    def _relay(self) -> RelayServer:
        return cast(RelayServer, self.server)

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Requests are not logged: devices come every few seconds."""

    def _answer(self) -> None:
        """Answers one request. After a refusal the connection ends, since a part of its body may be unread."""
        try:
            self._route()
        except ServerRefused as refused:
            self.close_connection = True
            status = 503 if refused.status == 401 else refused.status  # of the relay's own certificate
            content = error_body(refused.code, refused.message, **refused.details)
            retry = refused.retry_after or (RETRY_SECONDS if status >= 500 else None)
            self._send(status, content, {"retry-after": str(max(1, round(retry)))} if retry else {})
            self._drain()
        except Unreachable as error:
            self.close_connection = True
            content = error_body(
                "relay_unavailable", f"the relay has no answer from the coordinator: {error}"
            )
            self._send(503, content, {"retry-after": str(RETRY_SECONDS)})
            self._drain()
        except OSError:
            self.close_connection = True  # the device hung up, or the relay's disk failed: it tries again

    def _drain(self) -> None:
        """Reads what is left of a refused body, within limits: a connection that is closed before would lose the answer."""
        self.wfile.flush()
        self.connection.settimeout(_DRAIN_SECONDS)
        self.connection.shutdown(socket.SHUT_WR)
        left = _DRAIN_BYTES
        while left > 0 and (block := self.rfile.read1(min(left, _BLOCK_BYTES))):
            left -= len(block)

    def _route(self) -> None:
        url = urlsplit(self.path)
        if not url.path.startswith(PREFIX + "/"):
            raise _not_found()
        path = url.path.removeprefix(PREFIX)
        if (self.command, path) in _ANONYMOUS:
            self._forward(path, None, self._body(_ANONYMOUS_BYTES))
            return
        device = self._device()
        if path == "/checkin" and self.command == "POST":
            self._check_in(device)
        elif (blob := _BLOB.fullmatch(path)) and self.command == "GET":
            self._blob(device, path, blob[1])
        elif (task := _UPLOAD.fullmatch(path)) and self.command in ("POST", "PUT"):
            self._upload(device, task[1], path, url.query)
        elif _FORWARDED.fullmatch(path) and ".." not in path:
            self._forward(path, device, self._body(_MESSAGE_BYTES))
        else:
            raise _not_found()

    def _device(self) -> str:
        """The id in the certificate of this connection, which TLS has verified."""
        certificate = cast(ssl.SSLSocket, self.connection).getpeercert() or {}
        names = cast(Any, certificate.get("subjectAltName", ()))
        uris = [name for kind, name in names if kind == "URI"]
        if len(uris) != 1 or not uris[0].startswith(DEVICE_URI):
            raise ServerRefused(
                403, "no_certificate", "a relay answers devices with a certificate of their fleet"
            )
        return str(uris[0].removeprefix(DEVICE_URI))

    def _length(self, limit_bytes: int) -> int:
        if self.headers.get("transfer-encoding"):
            raise ServerRefused(411, "malformed", "the length of a body must be declared")
        declared = self.headers.get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 15:
            raise ServerRefused(411, "malformed", "the length of a body must be a number")
        if int(declared) > limit_bytes:
            raise ServerRefused(413, "oversized", f"a body here has at most {limit_bytes} bytes")
        return int(declared)

    def _body(self, limit_bytes: int) -> bytes | None:
        if self.command == "GET":
            return None
        size = self._length(limit_bytes)
        content = self.rfile.read(size)
        if len(content) < size:
            raise ConnectionResetError
        return content

    def _check_in(self, device: str) -> None:
        body = self._body(_MESSAGE_BYTES) or b""
        seconds = _LONGEST_HOLD_SECONDS
        with self._relay.intermediary.forward(
            "POST", "/checkin", device, body, wait_seconds=seconds
        ) as response:
            content = response.read(_ANSWER_BYTES, decode_content=False)
            headers = _down(response)
        if response.status == 200:
            with suppress(InvalidDocument):
                self._relay.offered.note(
                    device, parse_message(CheckInAnswer, loads(content, "answer"), "answer")
                )
        self._send(response.status, content, headers)

    def _blob(self, device: str, path: str, sha256: str) -> None:
        """From the relay's disk if the device was offered it since the relay started; else as the coordinator answers."""
        offered = self._relay.offered.find(device, sha256)
        if offered is None:
            self._forward(path, device, None)
            return
        file = self._relay.intermediary.fetch(offered, device)
        first, stop = _range(self.headers.get("range"), offered.size_bytes)
        status = 200 if first == 0 and stop == offered.size_bytes else 206
        headers = {"content-type": "application/octet-stream", "etag": f'"{sha256}"'}
        if status == 206:
            headers["content-range"] = f"bytes {first}-{stop - 1}/{offered.size_bytes}"
        self._send_head(status, stop - first, headers)
        _copy(file, first, stop, self.wfile.write)

    def _upload(self, device: str, task: str, path: str, query: str) -> None:
        uploads = self._relay.uploads
        if not uploads.is_kept(device, task):
            limit = _MESSAGE_BYTES if self.command == "POST" else _PIECE_BYTES
            size = self._length(limit)
            body = Body(cast(Any, self.rfile), size)
            self._forward(path + (f"?{query}" if query else ""), device, body)
            return
        if self.command == "POST":
            state = uploads.start(device, task, self._message(UploadStart))
        else:
            offset = parse_qs(query).get("offset", [""])[0]
            if not offset.isdecimal() or len(offset) > 15:
                raise ServerRefused(422, "malformed", "offset: expected a number of bytes")
            size = self._length(_PIECE_BYTES)
            state = uploads.append(device, task, int(offset), cast(Any, self.rfile), size)
        self._send(200, json.dumps(to_json(state)).encode(), {"content-type": "application/json"})

    def _message(self, kind: type[UploadStart]) -> UploadStart:
        name = kind.__name__
        try:
            return require_bounded(
                parse_message(kind, loads(self._body(_MESSAGE_BYTES) or b"", name), name), name
            )
        except InvalidDocument as error:
            raise ServerRefused(422, "malformed", str(error)) from None

    def _forward(self, path: str, device: str | None, body: bytes | Body | None) -> None:
        headers = {name: value for name in _FORWARDED_UP if (value := self.headers.get(name))}
        if body is not None:
            headers["content-type"] = self.headers.get("content-type", "application/json")
        with self._relay.intermediary.forward(self.command, path, device, body, headers) as response:
            length = response.headers.get("content-length")
            if length is None:
                self._send(
                    response.status, response.read(_ANSWER_BYTES, decode_content=False), _down(response)
                )
                return
            self._send_head(response.status, int(length), _down(response))
            for block in response.stream(_BLOCK_BYTES, decode_content=False):
                self.wfile.write(block)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self._send_head(status, len(content), {"content-type": "application/json", **headers})
        self.wfile.write(content)

    def _send_head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        """`headers` have the coordinator's date if it answered: devices set their clocks by it."""
        self.send_response_only(status)
        for name, value in {
            "date": self.date_time_string(),
            **headers,
            "content-length": str(length),
        }.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()


def _down(response: urllib3.BaseHTTPResponse) -> dict[str, str]:
    return {name: value for name in _FORWARDED_DOWN if (value := response.headers.get(name))}


def _range(header: str | None, size_bytes: int) -> tuple[int, int]:
    """First and past-the-end offset of the one range that a device may ask for."""
    if header is None:
        return 0, size_bytes
    match = re.fullmatch(r"bytes=(\d{1,15})-(\d{0,15})", header)
    if match is None or not int(match[1]) <= int(match[2] or size_bytes) or int(match[1]) >= size_bytes:
        raise ServerRefused(416, "bad_range", f"expected one range bytes=FIRST- within {size_bytes} bytes")
    return int(match[1]), min(int(match[2]) + 1, size_bytes) if match[2] else size_bytes


def _copy(file: Path, first: int, stop: int, write: Callable[[bytes], object]) -> None:
    with file.open("rb") as source:
        source.seek(first)
        while first < stop and (block := source.read(min(_BLOCK_BYTES, stop - first))):
            write(block)
            first += len(block)


def _not_found() -> ServerRefused:
    return ServerRefused(404, "not_found", "a relay has no such page")
