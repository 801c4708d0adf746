"""Someone without certificate or token, who writes bytes into a socket of a coordinator and hardly ever stops.

`Port` is one of its two ports; `endless` are requests that never come to their end.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from urllib.parse import urlsplit

PIECE_BYTES = 64 * 1024
_LONGEST_ANSWER = 64 * 1024
CONNECT_SECONDS = 60.0


@dataclass(frozen=True)
class Port:
    """Where a coordinator listens: with TLS where the URL says https; no certificate is shown or asked for."""

    url: str

    @property
    def is_tls(self) -> bool:
        return self.url.startswith("https")

    def connected(self) -> socket.socket:
        parts = urlsplit(self.url)
        plain = socket.create_connection((parts.hostname, parts.port), CONNECT_SECONDS)
        if not self.is_tls:
            return plain
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            return context.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise


@dataclass(frozen=True)
class Ending:
    """How a connection went: bytes that were sent, what came back, whether the other end closed it."""

    sent_bytes: int
    answer: bytes
    is_closed: bool

    @property
    def status(self) -> int:
        """Of the first answer; 0 without one."""
        words = self.answer.split(b" ", 2)
        return int(words[1]) if len(words) > 2 and words[0].startswith(b"HTTP/") else 0


def endless_headers(path: str) -> Iterator[bytes]:
    lines = b"".join(b"x-%06d: some value of a header\r\n" % at for at in range(PIECE_BYTES // 36))
    return chain([f"GET {path} HTTP/1.1\r\nhost: localhost\r\n".encode()], repeat(lines))


def endless_value(path: str) -> Iterator[bytes]:
    return chain([f"GET {path} HTTP/1.1\r\nhost: localhost\r\nx-long: ".encode()], repeat(b"v" * PIECE_BYTES))


def endless_url(path: str) -> Iterator[bytes]:
    return chain([f"GET {path}?".encode()], repeat(b"u" * PIECE_BYTES))


def endless_trailers(path: str) -> Iterator[bytes]:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n"
    lines = b"".join(b"x-%06d: some value of a trailer\r\n" % at for at in range(PIECE_BYTES // 37))
    return chain([head.encode()], repeat(lines))


def endless_extension(path: str) -> Iterator[bytes]:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2;name="
    return chain([head.encode()], repeat(b"e" * PIECE_BYTES))


def pipelined(path: str) -> Iterator[bytes]:
    """Requests without end, whose answers nobody reads."""
    request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    return repeat(request * (PIECE_BYTES // len(request)))


ENDLESS: Mapping[str, Callable[[str], Iterator[bytes]]] = {
    "headers": endless_headers,
    "value": endless_value,
    "url": endless_url,
    "trailers": endless_trailers,
    "extension": endless_extension,
    "pipelined": pipelined,
}


def flooded(port: Port, pieces: Iterator[bytes], max_bytes: int, seconds: float) -> Ending:
    """Sends until it is answered or cut off, most is sent, or time is up; then waits a while for an answer."""
    with port.connected() as line:
        line.setblocking(False)
        sent, piece, end = 0, memoryview(b""), time.monotonic() + seconds
        while sent < max_bytes and time.monotonic() < end:
            piece = piece or memoryview(next(pieces))
            try:
                count = line.send(piece)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
                if select.select([line], [line], [], 0.2)[0]:
                    break  # an answer, or the end
                continue
            except OSError:
                break
            sent, piece = sent + count, piece[count:]
        return Ending(sent, *read_answer(line, end))


def read_answer(line: socket.socket, end: float) -> tuple[bytes, bool]:
    """What comes until the other end closes the connection, or time is up, and which of both it was."""
    line.setblocking(False)
    answer = bytearray()
    while time.monotonic() < end and len(answer) < _LONGEST_ANSWER:
        try:
            block = line.recv(65_536)
        except (ssl.SSLWantReadError, BlockingIOError):
            select.select([line], [], [], 0.2)
            continue
        except OSError:
            return bytes(answer), True
        if not block:
            return bytes(answer), True
        answer += block
    return bytes(answer), False


def unfinished(path: str, declared_bytes: int = 2**20) -> bytes:
    """A request whose body does not come."""
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {declared_bytes}\r\n\r\n{{".encode()


def seconds_until_closed(slow: Iterable[socket.socket], most_seconds: float, *, drips: bool) -> float:
    """How long it takes until the other end has closed all of them; `drips`: each gets a byte a second meanwhile.

    Raises:
        AssertionError: not within so many seconds.
    """
    began = time.monotonic()
    lines, at = list(slow), 0.0
    while lines:
        seconds = time.monotonic() - began
        assert seconds < most_seconds, f"{len(lines)} are open after {seconds:.0f} s"
        if drips and seconds - at >= 1.0:
            at = seconds
            lines = [line for line in lines if _dripped(line)]
        ready = select.select(lines, [], [], 0.2)[0] if lines else []
        gone = {line for line in ready if _has_ended(line)}
        lines = [line for line in lines if line not in gone]
    return time.monotonic() - began


def _dripped(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        line.send(b" ")
    except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
        return True
    except OSError:
        return False
    return True


def _has_ended(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        return line.recv(65_536) == b""
    except (ssl.SSLWantReadError, BlockingIOError):
        return False
    except OSError:
        return True
