"""The device's end of the wire: HTTPS to one coordinator, and to no other.

A `Link` trusts exactly one CA, the one pinned at enrolment, and shows its certificate to a server that this
CA signed. It speaks TLS 1.3, goes through the proxy the environment or the configuration names, and keeps its
connection. What went wrong is told apart in `edge_client.failures`.
"""

from __future__ import annotations

import json
import ssl
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import urllib3

from edge_client.failures import ServerRefused, Unreachable, failure, refusal
from edge_client.wire.device import PREFIX, to_json
from edge_client.wire.strict import Unfit, loads, parse_message

T = TypeVar("T")

CONNECT_SECONDS = 15.0
SILENCE_SECONDS = 60.0
"""Longest silence within a request, beyond what it was told to wait for."""

_ANSWER_LIMIT = 1024 * 1024
_CHUNK_BYTES = 64 * 1024
"""Of a stream. A slow line brings no more than this between two looks whether to go on."""

_BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True)
class Credentials:
    """PEM files for the client's side of TLS."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Answer:
    """`date`: the coordinator's clock, seconds since 1970, where it told."""

    document: dict[str, Any]
    date: float | None


@runtime_checkable
class Sendable(Protocol):
    """A body whose size is known before it is read."""

    size_bytes: int

    def read(self, size: int = -1) -> bytes: ...


class Link:
    """A connection to the coordinator at `url`, whose TLS is `context`'s. Usable from a few threads at a time."""

    def __init__(self, url: str, context: ssl.SSLContext, *, proxy: str = "") -> None:
        self.url = url.rstrip("/")
        self._pool = _pool(self.url, context, proxy)

    def close(self) -> None:
        self._pool.clear()

    def content(self, path: str) -> bytes:
        """A small document as it is."""
        return self._whole("GET", path, None, SILENCE_SECONDS)[0]

    def date(self, path: str) -> float | None:
        """The other end's clock, seconds since 1970."""
        return self._whole("GET", path, None, SILENCE_SECONDS)[1]

    def post(self, path: str, message: Any, *, wait_seconds: float = 0.0) -> Answer:
        """The answer to a message of `wire.device`; `wait_seconds` is how long the coordinator may keep it.

        Raises:
            ServerRefused, Unreachable, CertificateExpired.
        """
        return self._json("POST", path, _body(message), SILENCE_SECONDS + wait_seconds)

    def put(self, path: str, piece: Sendable) -> Answer:
        """The answer to raw bytes, read while they are sent.

        Raises:
            ServerRefused, Unreachable, CertificateExpired.
        """
        return self._json("PUT", path, piece, SILENCE_SECONDS)

    @contextmanager
    def stream(self, path: str, first: int = 0, last: int | None = None) -> Iterator[Stream]:
        """Bytes of a file as they come, from the `first` on and to the `last`; also from 0 where ranges are not known.

        Raises:
            Unreachable, ServerRefused, CertificateExpired; within the block too.
        """
        end = "" if last is None else str(last)
        headers = {"Range": f"bytes={first}-{end}"} if first or last is not None else {}
        response = self._request("GET", path, None, SILENCE_SECONDS, headers)
        try:
            if response.status not in (200, 206):
                raise refusal(response, _limited(response))
            yield Stream(_chunks(response), first if response.status == 206 else 0)
        finally:
            # Unread bytes of a broken-off answer must not be taken for the next one.
            response.close() if response.length_remaining != 0 else response.release_conn()

    def _json(self, method: str, path: str, body: bytes | Sendable | None, seconds: float) -> Answer:
        content, date = self._whole(method, path, body, seconds)
        try:
            document = loads(content, "answer")
        except Unfit:
            document = None
        if not isinstance(document, dict):
            raise Unreachable(f"{self.url}{PREFIX}{path} answered with something that is not a JSON object")
        return Answer(document, date)

    def _whole(
        self, method: str, path: str, body: bytes | Sendable | None, seconds: float
    ) -> tuple[bytes, float | None]:
        response = self._request(method, path, body, seconds)
        try:
            content = _limited(response)
        finally:
            response.release_conn()
        if response.status >= 300:
            raise refusal(response, content)
        return content, _date(response.headers.get("Date"))

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | Sendable | None,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        kind = "application/octet-stream" if method == "PUT" else "application/json"
        sized = {"Content-Length": str(body.size_bytes)} if isinstance(body, Sendable) else {}
        try:
            return self._pool.request(
                method,
                self.url + PREFIX + path,
                body=body,  # type: ignore[arg-type]  # whatever has read() is sent so
                headers={"Content-Type": kind, "Accept-Encoding": "identity", **sized, **(headers or {})},
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds),
                preload_content=False,
                redirect=False,
                retries=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise failure(error, self.url) from None


@dataclass(frozen=True)
class Stream:
    """Bytes on their way. `first`: place in the file of the first of them."""

    chunks: Iterator[bytes]
    first: int


def pinned(ca_pem: str, credentials: Credentials | None = None) -> ssl.SSLContext:
    """TLS that trusts this one CA, and shows this device's certificate where it has one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=ca_pem)
    if credentials is not None:
        context.load_cert_chain(credentials.certificate, credentials.key)
    return context


def unverified_ca(url: str, proxy: str = "") -> bytes:
    """What a coordinator shows as its CA. Nothing vouches for it: the caller compares its hash.

    Raises:
        Unreachable, ServerRefused.
    """
    with _unverified(url, proxy) as link:
        return link.content("/ca")


def unverified_date(url: str, proxy: str = "") -> float | None:
    """What time the other end claims it is; for telling a person about clocks, and for nothing else."""
    try:
        with _unverified(url, proxy) as link:
            return link.date("/ca")
    except (Unreachable, ServerRefused):
        return None


def understood(kind: type[T], answer: Answer) -> T:
    """The answer as a message.

    Raises:
        Unreachable: it is none.
    """
    try:
        return parse_message(kind, answer.document, "answer")
    except Unfit as error:
        raise Unreachable(f"the coordinator's answer is not understood: {error}") from None


@contextmanager
def _unverified(url: str, proxy: str) -> Iterator[Link]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    link = Link(url, context, proxy=proxy)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
            yield link
    finally:
        link.close()


def _pool(url: str, context: ssl.SSLContext, proxy: str) -> urllib3.PoolManager:
    address = proxy or _proxy_for(url)
    if address:
        return urllib3.ProxyManager(address, ssl_context=context, maxsize=3, blocksize=_BLOCK_BYTES)
    return urllib3.PoolManager(ssl_context=context, maxsize=3, blocksize=_BLOCK_BYTES)


def _proxy_for(url: str) -> str:
    host = urlsplit(url).netloc.rpartition("@")[2]
    if urllib.request.proxy_bypass(host):
        return ""
    found = urllib.request.getproxies().get("https", "")
    return found if not found or "://" in found else f"http://{found}"


def _body(message: Any) -> bytes:
    return json.dumps(message if isinstance(message, dict) else to_json(message)).encode()


def _limited(response: urllib3.BaseHTTPResponse) -> bytes:
    try:
        content = response.read(_ANSWER_LIMIT + 1, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise failure(error, "the coordinator") from None
    if len(content) > _ANSWER_LIMIT:
        response.close()
        raise Unreachable(f"the coordinator's answer is longer than {_ANSWER_LIMIT} bytes")
    return content


def _chunks(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    try:
        yield from response.stream(_CHUNK_BYTES, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise failure(error, "the coordinator") from None


def _date(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except (ValueError, OverflowError):
        return None
