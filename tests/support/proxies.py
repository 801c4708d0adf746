"""What may stand between a device and its coordinator: a line that can be slow, cut or dead, and three kinds of proxy.

    Line                passes bytes on as they are: a TLS-passthrough balancer; adds delay, counts, cuts, refuses
    ConnectProxy        an HTTP proxy that is asked to CONNECT: what HTTPS_PROXY names
    TerminatingProxy    ends TLS, checks the device's certificate and tells the coordinator in a header

All listen on a port of the kernel's choice and serve from a thread of their own until closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ssl
import threading
from collections.abc import Callable, Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

_CHUNK_BYTES = 256 * 1024
_IN_FLIGHT = 64
"""Chunks under way in one direction; a line holds back a sender that is faster than its receiver."""

Address = tuple[str, int]


class _Listener:
    """A server of asyncio in a thread of its own."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server = self._do(
            asyncio.start_server(self._serve, host, 0, limit=_CHUNK_BYTES)
        )
        self.address: Address = self._server.sockets[0].getsockname()[:2]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every connection, and listens no more."""
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _end(self) -> None:
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            await self._pass(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # one side went away, or the other is not there: so does the whole connection
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class Line(_Listener):
    """TCP to `target`, as it comes.

    Attributes:
        bytes_up, bytes_down: passed on so far, to the target and back.
        accepted: connections so far.
        is_stalled: it holds bytes back, see `stall_after`.
    """

    def __init__(self, target: Address, *, delay_seconds: float = 0.0) -> None:
        self._target = target
        self._delay_seconds = delay_seconds
        self._cut_at: int | None = None
        self._is_dead = False
        self._stalls = False
        self.is_stalled = False
        self._given_up = asyncio.Event()
        self.bytes_up = 0
        self.bytes_down = 0
        self.accepted = 0
        super().__init__()

    @property
    def url(self) -> str:
        """Of the device API at the other end."""
        return f"https://{self.address[0]}:{self.address[1]}"

    @property
    def is_cut(self) -> bool:
        """Nothing passes: every connection that there was is over, and new ones are refused."""
        return self._is_dead and not self._connections

    def cut_after(self, bytes_up: int) -> None:
        """Lets so many more bytes through to the target, then breaks, and stays broken until `mend`."""
        self._cut_at = self.bytes_up + bytes_up

    def stall_after(self, bytes_up: int) -> None:
        """Lets so many more bytes through to the target, then holds back all that comes, until `mend`."""
        self._stalls = True
        self.cut_after(bytes_up)

    def cut(self) -> None:
        """Breaks at once."""
        self._do(self._break())

    def mend(self) -> None:
        """Everything passes again. What was held back never arrives."""
        if self.is_stalled:
            self._do(self._give_up())
        self._cut_at, self._is_dead, self._stalls, self.is_stalled = None, False, False, False

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._is_dead:
            return
        far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_CHUNK_BYTES)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._flow(reader, far_writer, self._went_up))
                both.create_task(self._flow(far_reader, writer, self._came_down))
        except* OSError:
            pass
        finally:
            # Closed, not aborted: what was counted as passed on does arrive.
            far_writer.close()

    async def _flow(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[bytes], bytes]
    ) -> None:
        """Each chunk leaves when its delay is over; chunks overlap, so that delay costs no bandwidth."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT)
        # A group: where leaving fails, nobody takes from the queue any more, and `put` would wait for ever.
        async with asyncio.TaskGroup() as group:
            group.create_task(self._leave(under_way, writer, count))
            while chunk := await reader.read(_CHUNK_BYTES):
                await under_way.put((self._loop.time() + self._delay_seconds, chunk))
            if self._is_dead:
                raise ConnectionAbortedError
            await under_way.put((self._loop.time() + self._delay_seconds, b""))

    async def _leave(
        self,
        under_way: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        count: Callable[[bytes], bytes],
    ) -> None:
        while True:
            due, chunk = await under_way.get()
            if due > self._loop.time():
                await asyncio.sleep(due - self._loop.time())
            if not chunk:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            passed = count(chunk)
            writer.write(passed)
            await writer.drain()
            if len(passed) < len(chunk):
                if self._stalls:
                    await self._stall()
                await self._break()
                raise ConnectionAbortedError

    def _went_up(self, chunk: bytes) -> bytes:
        """What of the chunk goes through."""
        room = len(chunk) if self._cut_at is None else max(0, self._cut_at - self.bytes_up)
        self.bytes_up += len(chunk[:room])
        return chunk[:room]

    def _came_down(self, chunk: bytes) -> bytes:
        self.bytes_down += len(chunk)
        return chunk

    async def _stall(self) -> None:
        """Both ends keep their connection, until `mend`."""
        self._given_up.clear()
        self.is_stalled = True
        await self._given_up.wait()
        raise ConnectionAbortedError

    async def _give_up(self) -> None:
        """Ends what is stalled, on both sides."""
        await self._break()
        self._given_up.set()
        while self._connections:
            await asyncio.sleep(0.01)

    async def _break(self) -> None:
        self._is_dead = True
        for writer in tuple(self._connections):
            writer.transport.abort()


class ConnectProxy(_Listener):
    """An HTTP proxy that tunnels to wherever it is told.

    Attributes:
        requests: the first line of each request it was sent, such as `CONNECT localhost:8443 HTTP/1.1`.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        self.requests.append(head.splitlines()[0])
        method, where, _ = self.requests[-1].split()
        if method != "CONNECT":
            writer.write(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        host, _, port = where.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, far_writer))
                both.create_task(_copy(far_reader, writer))
        except* OSError:
            pass
        finally:
            far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


class TerminatingProxy:
    """Ends the client's TLS and speaks to the coordinator in its name: over TLS to the device API, in clear to the operator API.

    It has a certificate of the coordinator's CA, checks that of the device against the same CA, and forwards it as
    `X-Client-Cert`, PEM made fit for a header by percent-encoding, as nginx's `$ssl_client_escaped_cert` does. A
    header of that name that a device sends is dropped. To the operator API it sends `X-Forwarded-Proto: https`.

    Attributes:
        paths: what was asked for, without the query.
    """

    def __init__(
        self, target: Address, pki: Path, *, source: str = "127.0.0.1", to_operator: bool = False
    ) -> None:
        """`pki`: the folder with the coordinator's own certificates; `source`: the address it connects from."""
        self.paths: list[str] = []
        outward = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        outward.load_verify_locations(pki / "ca.pem")
        proxy = self

        class Handler(_Forwarding):
            paths = proxy.paths
            adds = {"X-Forwarded-Proto": "https"} if to_operator else {}

            def far(self) -> http.client.HTTPConnection:
                if to_operator:
                    return http.client.HTTPConnection(*target, timeout=120, source_address=(source, 0))
                return http.client.HTTPSConnection(
                    *target, context=outward, timeout=120, source_address=(source, 0)
                )

        self._server = _TlsServer(("127.0.0.1", 0), Handler, _inward(pki))
        self.address: Address = self._server.socket.getsockname()[:2]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="proxy", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://{self.address[0]}:{self.address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _inward(pki: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "server.pem", pki / "server.key")
    context.load_verify_locations(pki / "ca.pem")
    context.verify_mode = ssl.CERT_OPTIONAL  # enrolment has none yet
    return context


class _TlsServer(ThreadingHTTPServer):
    """TLS begins in the thread of the connection, so that a silent one holds nobody up."""

    block_on_close = False

    def __init__(
        self, address: Address, handler: type[BaseHTTPRequestHandler], context: ssl.SSLContext
    ) -> None:
        self._context = context
        self._handler = handler
        super().__init__(address, handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(120)
        with contextlib.suppress(OSError), self._context.wrap_socket(request, server_side=True) as secured:
            self._handler(secured, client_address, self)


class _Forwarding(BaseHTTPRequestHandler):
    """One connection of a client, and one of ours to the coordinator for each request of it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its headers
    paths: list[str]
    adds: dict[str, str]

    def far(self) -> http.client.HTTPConnection:
        raise NotImplementedError

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def do_PUT(self) -> None:
        self._forward()

    def log_message(self, *args: Any) -> None:
        """Says nothing."""

    def _forward(self) -> None:
        self.paths.append(self.path.partition("?")[0])
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kept = {key: value for key, value in self.headers.items() if key.lower() not in _NOT_PASSED_ON}
        kept |= self.adds
        certificate = self.connection.getpeercert(binary_form=True)
        if certificate:
            kept["X-Client-Cert"] = quote(ssl.DER_cert_to_PEM_cert(certificate), safe="")
        far = self.far()
        try:
            far.request(self.command, self.path, body or None, kept)
            answer = far.getresponse()
            content = answer.read()
        finally:
            far.close()
        self.send_response_only(answer.status, answer.reason)
        for key, value in answer.getheaders():
            if key.lower() not in _NOT_PASSED_ON:
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


_NOT_PASSED_ON = {
    "connection",
    "keep-alive",
    "content-length",
    "transfer-encoding",
    "x-client-cert",
    "x-forwarded-proto",
}
