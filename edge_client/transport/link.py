"""The device's HTTPS connection to its coordinator: requests, resumable downloads and uploads.

A `Link` trusts exactly one CA, the one pinned at enrolment, and presents its certificate only to a server that this
CA signed. It uses TLS 1.3, the proxy of the environment or the configuration, and keep-alive. Errors are those of
`edge_client.transport.failures`.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import urllib3

from edge_client.clock import CLOCK_TOLERANCE_SECONDS, describe_clock_error
from edge_client.files import file_sha256
from edge_client.transport.failures import ServerRefused, Unreachable, WrongClock, refusal, translate
from edge_client.transport.piece import Piece
from edge_client.wire.device import PREFIX, BlobRef, UploadStart, UploadState, to_json
from edge_client.wire.strict import InvalidDocument, loads, parse_message

T = TypeVar("T")

# `describe_wrong_clock` reports a wrong clock instead.
warnings.simplefilter("ignore", urllib3.exceptions.SystemTimeWarning)

CONNECT_SECONDS = 15.0
SILENCE_SECONDS = 60.0
"""Longest silence within a request, in addition to the wait it asked for."""

_ANSWER_LIMIT = 1024 * 1024
_CONNECTIONS = 3
_CHUNK_BYTES = 64 * 1024
"""Of a stream: at most so much is received between two checks for cancellation."""

_BLOCK_BYTES = 256 * 1024

PIECE_BYTES = 32 * 1024 * 1024
"""Of a result in one request; read and sent in small blocks."""


@dataclass(frozen=True)
class Credentials:
    """PEM files for the client's side of TLS."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Answer:
    """`date`: the coordinator's clock, seconds since 1970, if it sent one."""

    document: dict[str, Any]
    date: float | None


class Link:
    """A connection to the coordinator at `url` with the TLS settings of `context`, kept open for as many threads as `connections`."""

    def __init__(
        self, url: str, context: ssl.SSLContext, *, proxy: str = "", connections: int = _CONNECTIONS
    ) -> None:
        self.url = url.rstrip("/")
        self._pool = _pool(self.url, context, proxy, connections)
        self._headers: Mapping[str, str] = {}

    def naming(self, header: str, value: str) -> Link:
        """The same connections; every request has this header."""
        named = copy(self)
        named._headers = {header: value}
        return named

    def close(self) -> None:
        self._pool.clear()

    def content(self, path: str) -> bytes:
        """A small document, unparsed."""
        return self._read_all("GET", path, None, SILENCE_SECONDS)[0]

    def date(self, path: str) -> float | None:
        """The server's clock, seconds since 1970."""
        return self._read_all("GET", path, None, SILENCE_SECONDS)[1]

    def post(self, path: str, message: Any, *, wait_seconds: float = 0.0) -> Answer:
        """The answer to a message of `wire.device`; `wait_seconds`: how long the coordinator may hold the request.

        Raises:
            ServerRefused, Unreachable, CertificateExpired.
        """
        body = json.dumps(message if isinstance(message, dict) else to_json(message)).encode()
        return self._json("POST", path, body, SILENCE_SECONDS + wait_seconds)

    def put(self, path: str, piece: Piece) -> Answer:
        """The answer to raw bytes, which are read while they are sent.

        Raises:
            ServerRefused, Unreachable, CertificateExpired.
        """
        return self._json("PUT", path, piece, SILENCE_SECONDS)

    @contextmanager
    def stream(self, path: str, first: int = 0, last: int | None = None) -> Iterator[Stream]:
        """Bytes of a file as they arrive, from `first` to `last`; from 0 if the server does not support ranges.

        Raises:
            Unreachable, ServerRefused, CertificateExpired; within the block too.
        """
        end = "" if last is None else str(last)
        headers = {"Range": f"bytes={first}-{end}"} if first or last is not None else {}
        response = self._request("GET", path, None, SILENCE_SECONDS, headers)
        try:
            if response.status not in (200, 206):
                raise refusal(response, _read_limited(response))
            yield Stream(_chunks(response), first if response.status == 206 else 0)
        finally:
            # Unread bytes of an abandoned answer must not be read as the next answer.
            response.close() if response.length_remaining != 0 else response.release_conn()

    def forward(
        self, method: str, path: str, body: bytes | Piece | None, seconds: float, headers: Mapping[str, str]
    ) -> urllib3.BaseHTTPResponse:
        """The answer as it is, unread; `seconds`: longest silence. The caller releases it. Raises: Unreachable, CertificateExpired."""
        return self._request(method, path, body, seconds, headers)

    def _json(self, method: str, path: str, body: bytes | Piece | None, seconds: float) -> Answer:
        content, date = self._read_all(method, path, body, seconds)
        try:
            document = loads(content, "answer")
        except InvalidDocument:
            document = None
        if not isinstance(document, dict):
            raise Unreachable(f"{self.url}{PREFIX}{path} answered with something that is not a JSON object")
        return Answer(document, date)

    def _read_all(
        self, method: str, path: str, body: bytes | Piece | None, seconds: float
    ) -> tuple[bytes, float | None]:
        response = self._request(method, path, body, seconds)
        try:
            content = _read_limited(response)
        finally:
            response.release_conn()
        if response.status >= 300:
            raise refusal(response, content)
        return content, _date(response.headers.get("Date"))

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | Piece | None,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        kind = "application/octet-stream" if method == "PUT" else "application/json"
        sized = {"Content-Length": str(body.size_bytes)} if isinstance(body, Piece) else {}
        try:
            return self._pool.request(
                method,
                self.url + PREFIX + path,
                body=body,  # type: ignore[arg-type]  # urllib3 sends anything with read()
                headers={
                    "Content-Type": kind,
                    "Accept-Encoding": "identity",
                    **sized,
                    **self._headers,
                    **(headers or {}),
                },
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds),
                preload_content=False,
                redirect=False,
                retries=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise translate(error, self.url) from None


@dataclass(frozen=True)
class Stream:
    """Bytes being received. `first`: offset of the first one in the file."""

    chunks: Iterator[bytes]
    first: int


def pinned_context(ca_pem: str, credentials: Credentials | None = None) -> ssl.SSLContext:
    """TLS settings that trust only this CA, with this device's certificate if it has one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=ca_pem)
    if credentials is not None:
        context.load_cert_chain(credentials.certificate, credentials.key)
    return context


def unverified_ca(url: str, proxy: str = "") -> bytes:
    """The CA certificate that a coordinator sends, unverified: the caller compares its hash.

    Raises:
        Unreachable, ServerRefused.
    """
    with _unverified(url, proxy) as link:
        return link.content("/ca")


def unverified_date(url: str, proxy: str = "") -> float | None:
    """The server's unverified clock; only for messages to people about clocks."""
    try:
        with _unverified(url, proxy) as link:
            return link.date("/ca")
    except (Unreachable, ServerRefused):
        return None


def describe_wrong_clock(error: WrongClock, url: str, own: float, proxy: str = "") -> str:
    """A message for people when the coordinator's certificate is not valid by this machine's clock, which says `own`."""
    message = f"{error}; this machine's clock says {datetime.fromtimestamp(own, UTC):%Y-%m-%d %H:%M} UTC"
    date = unverified_date(url, proxy)
    behind = None if date is None else date - own
    if behind is None or abs(behind) <= CLOCK_TOLERANCE_SECONDS:
        return f"{message}, which agrees with the coordinator's: its certificate must be renewed"
    return f"{message}; {describe_clock_error(-behind)}"


def parse_answer(kind: type[T], answer: Answer) -> T:
    """The answer as a message.

    Raises:
        Unreachable: it is not one.
    """
    try:
        return parse_message(kind, answer.document, "answer")
    except InvalidDocument as error:
        raise Unreachable(f"the coordinator's answer cannot be parsed: {error}") from None


@contextmanager
def _unverified(url: str, proxy: str) -> Iterator[Link]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with closing(Link(url, context, proxy=proxy)) as link, warnings.catch_warnings():
        warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
        yield link


def _pool(url: str, context: ssl.SSLContext, proxy: str, connections: int) -> urllib3.PoolManager:
    address = proxy or _proxy_for(url)
    if address:
        return urllib3.ProxyManager(address, ssl_context=context, maxsize=connections, blocksize=_BLOCK_BYTES)
    return urllib3.PoolManager(ssl_context=context, maxsize=connections, blocksize=_BLOCK_BYTES)


def _proxy_for(url: str) -> str:
    host = urlsplit(url).netloc.rpartition("@")[2]
    if urllib.request.proxy_bypass(host):
        return ""
    proxy = urllib.request.getproxies().get("https", "")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _read_limited(response: urllib3.BaseHTTPResponse) -> bytes:
    try:
        content = response.read(_ANSWER_LIMIT + 1, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise translate(error, "the coordinator") from None
    if len(content) > _ANSWER_LIMIT:
        response.close()
        raise Unreachable(f"the coordinator's answer is longer than {_ANSWER_LIMIT} bytes")
    return content


def _chunks(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    try:
        yield from response.stream(_CHUNK_BYTES, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise translate(error, "the coordinator") from None


def _date(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except (ValueError, OverflowError):
        return None


def download(
    link: Link, blob: BlobRef, path: Path, *, check_cancelled: Callable[[], None] = lambda: None
) -> None:
    """Downloads a blob to `path` and checks its hash. Resumes a partial file, after restarts too.

    Raises:
        Unreachable: try again, the bytes received so far are kept; or the bytes have the wrong hash.
        ServerRefused: the coordinator has no such blob, or not for this device.
    """
    if path.exists():
        return
    partial = path.with_name(path.name + ".part")
    digest = None
    if not partial.exists() or partial.stat().st_size != blob.size_bytes:
        digest = _fetch(link, blob, partial, check_cancelled)
    if (
        partial.stat().st_size != blob.size_bytes
        or (digest or file_sha256(partial, check_cancelled)) != blob.sha256
    ):
        partial.unlink()
        raise Unreachable(
            f"the bytes received for blob {blob.sha256[:12]} have another hash; they are fetched again"
        )
    partial.replace(path)


def upload(
    link: Link,
    task: str,
    payload: Path,
    start: UploadStart,
    *,
    check_cancelled: Callable[[], None] = lambda: None,
) -> UploadState:
    """Sends a result from the coordinator's offset on. Returns the last answer.

    Raises:
        Unreachable: the connection was lost; the next call resumes.
        ServerRefused: 409 `round_closed`, 422 and its reason, and others.
    """
    state = parse_answer(UploadState, link.post(f"/tasks/{task}/upload", start))
    with payload.open("rb") as file:
        while not state.accepted:
            if not 0 <= state.offset < start.size_bytes:
                raise Unreachable(
                    f"the coordinator holds {state.offset} of {start.size_bytes} bytes and does not accept"
                )
            piece = Piece(
                file, state.offset, min(PIECE_BYTES, start.size_bytes - state.offset), check_cancelled
            )
            state = _send_piece(link, task, state.offset, piece)
    return state


def _send_piece(link: Link, task: str, offset: int, piece: Piece) -> UploadState:
    path = f"/tasks/{task}/upload?offset={offset}"
    try:
        after = parse_answer(UploadState, link.put(path, piece))
    except ServerRefused as refused:
        # A piece may have arrived and its acknowledgement been lost: the coordinator knows the offset.
        if refused.code != "upload_offset" or not isinstance(refused.details.get("offset"), int):
            raise
        after = UploadState(refused.details["offset"])
    if not after.accepted and after.offset <= offset:
        raise Unreachable(f"the upload makes no progress from byte {offset}")
    return after


def _fetch(link: Link, blob: BlobRef, partial: Path, check_cancelled: Callable[[], None]) -> str | None:
    """Fetches the missing bytes. Returns the SHA-256 of the file if all of it was fetched now, else None."""
    have = partial.stat().st_size if partial.exists() else 0
    if have > blob.size_bytes:
        partial.unlink()
        have = 0
    digest = hashlib.sha256()
    with (
        link.stream(f"/blobs/{blob.sha256}", have) as stream,
        partial.open("ab" if stream.first else "wb") as file,
    ):
        size = file.tell()
        for chunk in stream.chunks:
            check_cancelled()
            size += len(chunk)
            if size > blob.size_bytes:
                break  # the hash cannot match; the caller finds out
            file.write(chunk)
            digest.update(chunk)
    return None if stream.first else digest.hexdigest()
