"""The device's end of the wire: HTTPS to one coordinator, and to no other.

A `Link` trusts exactly one CA, the one pinned at enrolment, and shows its certificate to a server that this
CA signed. It speaks TLS 1.3, goes through the proxy the environment or the configuration names, keeps its
connection, and tells two things apart: the coordinator refused (`ServerRefused`, with its code), or it could
not be reached (`Unreachable`), where a retry may help. When to retry is `Backoff`'s to say.
"""

from __future__ import annotations

import hashlib
import json
import random
import ssl
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

import urllib3

from edge_client.wire.device import PREFIX, BlobRef, UploadStart, UploadState, to_json
from edge_client.wire.strict import Unfit, loads, parse_message, printable

T = TypeVar("T")

PIECE_BYTES = 32 * 1024 * 1024
"""Of a result, in one request; read and sent in small blocks."""

CONNECT_SECONDS = 15.0
SILENCE_SECONDS = 60.0
"""Longest silence within a request, beyond what it was told to wait for."""

LONGEST_WAIT_SECONDS = 3600.0
"""However long a coordinator tells a device to stay away, it asks again after this."""

_ANSWER_LIMIT = 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_BLOCK_BYTES = 256 * 1024
_NOT_YET_VALID, _EXPIRED = 9, 10  # X509_V_ERR_…, openssl/x509_vfy.h


class Unreachable(Exception):
    """No answer, or none that makes sense; worth another try later. The message is for people."""


class WrongClock(Unreachable):
    """The coordinator's certificate is not valid by this machine's clock."""


class CertificateExpired(Exception):
    """The coordinator does not take this device's certificate any more because of its dates."""


class Cancelled(Exception):
    """A transfer was given up because the daemon has something better to do."""


class ServerRefused(Exception):
    """The coordinator's refusal: HTTP status, its stable code, its words, further details."""

    def __init__(
        self,
        status: int,
        code: str,
        words: str,
        details: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{words} ({status} {code})")
        self.status = status
        self.code = code
        self.words = words
        self.details = details or {}
        self.retry_after = retry_after

    @property
    def passing(self) -> bool:
        """The same request may be taken later."""
        return self.status >= 500 or self.status in (408, 425, 429)


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

    def download(self, blob: BlobRef, path: Path, *, going: Callable[[], None] = lambda: None) -> None:
        """Puts a blob at `path`, its hash checked. A partial file beside it is gone on from, over restarts too.

        Raises:
            Unreachable: try again, what came so far is kept; or the bytes were not those asked for.
            ServerRefused: it has no such blob, or not for this device.
        """
        if path.exists():
            return
        partial = path.with_name(path.name + ".part")
        came = None
        if not partial.exists() or partial.stat().st_size != blob.size_bytes:
            came = self._fetch(blob, partial, going)
        if partial.stat().st_size != blob.size_bytes or (came or file_sha256(partial, going)) != blob.sha256:
            partial.unlink()
            raise Unreachable(
                f"what came for blob {blob.sha256[:12]} is not what its hash says; fetched anew"
            )
        partial.replace(path)

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
                raise _refusal(response, _limited(response))
            yield Stream(_chunks(response), first if response.status == 206 else 0)
        finally:
            # Unread bytes of a broken-off answer must not be taken for the next one.
            response.close() if response.length_remaining != 0 else response.release_conn()

    def upload(
        self, task: str, payload: Path, start: UploadStart, *, going: Callable[[], None] = lambda: None
    ) -> UploadState:
        """Sends a result, from where the coordinator has it; the last answer.

        Raises:
            Unreachable: cut off; the next call goes on from there.
            ServerRefused: 409 `round_closed`, 422 and its reason, and others.
        """
        state = self._state(self.post(f"/tasks/{task}/upload", start))
        with payload.open("rb") as file:
            while not state.accepted:
                if not 0 <= state.offset < start.size_bytes:
                    raise Unreachable(
                        f"the coordinator holds {state.offset} of {start.size_bytes} bytes, accepts not"
                    )
                piece = Piece(file, state.offset, min(PIECE_BYTES, start.size_bytes - state.offset), going)
                state = self._piece(task, state.offset, piece)
        return state

    def _piece(self, task: str, offset: int, piece: Piece) -> UploadState:
        path = f"/tasks/{task}/upload?offset={offset}"
        try:
            after = self._state(self._json("PUT", path, piece, SILENCE_SECONDS))
        except ServerRefused as refused:
            # A piece may have arrived whose acknowledgement was lost; then it knows better where we are.
            if refused.code != "upload_offset" or not isinstance(refused.details.get("offset"), int):
                raise
            after = UploadState(refused.details["offset"])
        if not after.accepted and after.offset <= offset:
            raise Unreachable(f"the upload does not move on from byte {offset}")
        return after

    def _state(self, answer: Answer) -> UploadState:
        return understood(UploadState, answer)

    def _fetch(self, blob: BlobRef, partial: Path, going: Callable[[], None]) -> str | None:
        """Adds what is missing. The SHA-256 of the file where all of it came now, else None."""
        have = partial.stat().st_size if partial.exists() else 0
        if have > blob.size_bytes:
            partial.unlink()
            have = 0
        digest = hashlib.sha256()
        headers = {"Range": f"bytes={have}-"} if have else {}
        response = self._request("GET", f"/blobs/{blob.sha256}", None, SILENCE_SECONDS, headers)
        try:
            if response.status not in (200, 206):
                raise _refusal(response, _limited(response))
            with partial.open("ab" if response.status == 206 else "wb") as file:
                size = file.tell()
                for chunk in _chunks(response):
                    going()
                    size += len(chunk)
                    if size > blob.size_bytes:
                        break  # no hash can fit any more; the caller finds out
                    file.write(chunk)
                    digest.update(chunk)
        finally:
            # Unread bytes of a broken-off answer must not be taken for the next one.
            response.close() if response.length_remaining else response.release_conn()
        return digest.hexdigest() if response.status == 200 else None

    def _json(self, method: str, path: str, body: bytes | Piece | None, seconds: float) -> Answer:
        content, date = self._whole(method, path, body, seconds)
        try:
            document = loads(content, "answer")
        except Unfit:
            document = None
        if not isinstance(document, dict):
            raise Unreachable(f"{self.url}{PREFIX}{path} answered with something that is not a JSON object")
        return Answer(document, date)

    def _whole(
        self, method: str, path: str, body: bytes | Piece | None, seconds: float
    ) -> tuple[bytes, float | None]:
        response = self._request(method, path, body, seconds)
        try:
            content = _limited(response)
        finally:
            response.release_conn()
        if response.status >= 300:
            raise _refusal(response, content)
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
                body=body,  # type: ignore[arg-type]  # whatever has read() is sent so
                headers={"Content-Type": kind, "Accept-Encoding": "identity", **sized, **(headers or {})},
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=seconds),
                preload_content=False,
                redirect=False,
                retries=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _failure(error, self.url) from None


@dataclass(frozen=True)
class Stream:
    """Bytes on their way. `first`: place in the file of the first of them."""

    chunks: Iterator[bytes]
    first: int


class Piece:
    """A part of a file as the body of a request: read while it is sent. `going` is called between blocks."""

    def __init__(self, file: BinaryIO, offset: int, size_bytes: int, going: Callable[[], None]) -> None:
        file.seek(offset)
        self.size_bytes = size_bytes
        self._file = file
        self._left = size_bytes
        self._going = going

    def read(self, size: int = -1) -> bytes:
        self._going()
        block = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(block)
        return block


class Backoff:
    """How long to wait after the n-th failure in a row: anything up to min(longest, first · 2ⁿ), full jitter.

    Full jitter spreads devices that failed together better than any other scheme (Brooker 2015). What the
    coordinator asks for counts as the least. While the caller expects it back soon it gives a lower bound on top,
    `at_most`, and the waits do not grow beyond.
    """

    def __init__(
        self, rng: random.Random, *, first_seconds: float = 1.0, longest_seconds: float = 300.0
    ) -> None:
        self._rng = rng
        self._first = first_seconds
        self._longest = longest_seconds
        self._failures = 0

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, at_least: float | None = None, *, at_most: float | None = None) -> float:
        """Seconds to wait now."""
        longest = self._longest if at_most is None else min(at_most, self._longest)
        ceiling = min(longest, self._first * 2**self._failures)
        self._failures += ceiling < longest
        return (at_least or 0.0) + self._rng.uniform(0.0, ceiling)


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
        raise _failure(error, "the coordinator") from None
    if len(content) > _ANSWER_LIMIT:
        response.close()
        raise Unreachable(f"the coordinator's answer is longer than {_ANSWER_LIMIT} bytes")
    return content


def _chunks(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    try:
        yield from response.stream(_CHUNK_BYTES, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _failure(error, "the coordinator") from None


def _refusal(response: urllib3.BaseHTTPResponse, content: bytes) -> Exception:
    """A refusal in the coordinator's own words; of another kind it comes from somebody between."""
    try:
        document: Any = loads(content, "refusal")
        details = dict(document["error"])
        code, words = printable(str(details.pop("code")), 60), printable(str(details.pop("message")))
    except (ValueError, KeyError, TypeError):
        reason = printable(response.reason or "", 100)
        code, words, details = "unknown", f"HTTP {response.status} {reason}".strip(), {}
    return ServerRefused(response.status, code, words, details, _seconds(response.headers.get("Retry-After")))


def _seconds(text: str | None) -> float | None:
    try:
        return min(max(0.0, float(text)), LONGEST_WAIT_SECONDS) if text else None
    except ValueError:
        return None


def _date(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except (ValueError, OverflowError):
        return None


def _failure(error: BaseException, where: str) -> Exception:
    """What urllib3 wraps, unwrapped and in words."""
    cause = _tls_cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in (_NOT_YET_VALID, _EXPIRED):
            return WrongClock(f"{where}: its certificate is not valid now: {cause.verify_message}")
        return Unreachable(
            f"{where} is not the coordinator this device enrolled with: {cause.verify_message}; "
            "if it was moved or made anew, enroll again"
        )
    if isinstance(cause, ssl.SSLError) and "CERTIFICATE_EXPIRED" in str(cause).upper().replace(" ", "_"):
        return CertificateExpired(f"{where} says that this device's certificate has expired")
    return Unreachable(f"{where} cannot be reached: {_words(error)}")


def _tls_cause(error: BaseException | None) -> BaseException | None:
    seen = 0
    while error is not None and not isinstance(error, ssl.SSLError) and seen < 10:
        inner = [
            each
            for each in (error.__cause__, error.__context__, *error.args)
            if isinstance(each, BaseException)
        ]
        error = inner[0] if inner else None
        seen += 1
    return error


def _words(error: BaseException) -> str:
    text = str(error)
    return text.rpartition(": ")[2] if "HTTPSConnection" in text else text or type(error).__name__


def file_sha256(path: Path, going: Callable[[], None] = lambda: None) -> str:
    """Lower-case hex digest, `going` called between the pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            going()
            digest.update(chunk)
    return digest.hexdigest()
