"""HTTP/1.1 for both servers of a coordinator: uvicorn's protocol, with the limits that it and its parser lack.

    sizes   request line, header block, number of headers, trailers and chunk framing: 414 or 431, and the connection ends
    time    for a head, between two pieces of a body, for the client to read a response, for the rest of an answered request

The parser (llhttp) buffers a header of any size until it ends, and uvicorn closes only idle connections. So bytes are
counted before they are parsed: data that neither completes a head nor adds to a body is limited.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

URL_BYTES = 8 * 1024
HEAD_BYTES = 16 * 1024
"""Limit of a request line with all headers; also of trailers, and of the framing between two pieces of a chunked body."""
MAX_HEADERS = 100
MAX_PIPELINED = 8
"""Requests that wait for the response to an earlier one. Each takes some KB."""

HEADER_SECONDS = 20.0
"""From the opening of a connection, or the first byte of a further request, to the end of the headers."""
STALL_SECONDS = 60.0
"""Without receiving a byte of the body, or without the client reading a byte of the response."""
ANSWERED_SECONDS = 5.0
"""To finish after a response: for the rest of the request body, for the client to read the response, for the close."""
REFUSED_SECONDS = 1.0
"""For the client to close a refused connection."""
_DISCARDED_BYTES = 2**20
"""Read meanwhile, so that a client that is still sending sees the response and not a reset."""

_log = structlog.get_logger("fedloop.http")


class LimitedProtocol(HttpToolsProtocol):
    """A connection whose memory and time do not grow with what a stranger sends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._progress_timer: asyncio.TimerHandle | None = None
        self._framing_bytes = 0
        """Since the end of the last head or request, or the last byte of a body."""
        self._excess: tuple[int, str, str] | None = None
        """Status, code and message of a refusal, set by a parser callback."""
        self.on_request_done: Callable[[], None] = lambda: None
        """Called when a request is received or answered, and when the connection ends."""
        self._discarded_bytes: int | None = None
        """Since the connection was refused; None if it was not."""

    # The connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_deadline(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._stop_watching()
        self.on_request_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and self._discarded_bytes is None and not self.transport.is_closing():
            if self._framing_bytes == HEAD_BYTES:
                what = "the request line and headers" if self._in_head else "trailers or chunk framing"
                self._refuse(431, "headers_too_large", f"{what} have more than {HEAD_BYTES} bytes")
                break
            end = HEAD_BYTES - self._framing_bytes
            piece, rest = rest[:end], rest[end:]
            self._framing_bytes += len(piece)
            super().data_received(piece)  # type: ignore[arg-type]
        if self._discarded_bytes is not None:
            self._discard(len(rest))
        elif self._is_idle and self._deadline is None and self.timeout_keep_alive_task is None:
            self._set_deadline(HEADER_SECONDS)  # empty lines before a request cancelled the deadline

    # Parser callbacks. An exception in them leads to a call of `send_400_response`.

    def on_message_begin(self) -> None:
        self._set_deadline(HEADER_SECONDS)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._excess = (414, "url_too_long", f"the URL has more than {URL_BYTES} bytes")
            raise ValueError(self._excess)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: uvicorn would treat it as a header, after all checks have passed
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._excess = (431, "headers_too_large", f"there are more than {MAX_HEADERS} headers")
            raise ValueError(self._excess)

    def on_headers_complete(self) -> None:
        self._framing_bytes = 0
        self._set_deadline(STALL_SECONDS)
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError("too many pipelined requests")

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if not self.cycle.response_complete:
            self._set_deadline(STALL_SECONDS)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._framing_bytes = 0
        self._set_deadline(None)
        super().on_message_complete()
        self.cycle.more_body = False
        self.on_request_done()

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_if_open(message: Any) -> None:
                if self.transport.is_closing():  # a write would raise, and look like our failure
                    cycle.disconnected = True
                await send(message)

            await app(scope, receive, send_if_open)
            if cycle.response_complete:
                scope.clear()  # 8 KB of routes and dependencies, which an idle connection would hold

        super()._start_asgi_task(cycle, answer)

    def send_400_response(self, msg: str) -> None:
        """Answers malformed HTTP in the usual error format, and ends the connection."""
        self._refuse(*(self._excess or (400, "malformed", msg)))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.on_request_done()
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self._watch_progress(ANSWERED_SECONDS)
        elif self.cycle.response_complete and self.cycle.more_body:
            self._set_deadline(ANSWERED_SECONDS)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_progress(STALL_SECONDS)

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _unsupported_upgrade_warning(self) -> None:
        """Silent: a request for another protocol is answered in this one."""

    @property
    def _in_head(self) -> bool:
        """Whether the next bytes belong to a head, not to the body or trailers of a request."""
        return self.cycle is None or self.cycle.scope is not self.scope or not self.cycle.more_body

    @property
    def _is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answers, if it is this request's turn, and ends the connection."""
        _log.info("request_refused", status=status, code=code, peer=self.client and self.client[0])
        cycle = self.cycle
        if self._in_head:
            has_turn = cycle is None or cycle.response_complete
        else:
            has_turn = not self.pipeline and not cycle.response_started
        self._discarded_bytes = 0
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        if not has_turn:
            self.transport.abort()
            return
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        # Closing with unread bytes would reset the connection, and the reset can overtake the response.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._set_deadline(REFUSED_SECONDS)

    def _discard(self, size_bytes: int) -> None:
        assert self._discarded_bytes is not None
        self._discarded_bytes += size_bytes
        if self._discarded_bytes > _DISCARDED_BYTES:
            self.transport.abort()

    # Time

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._on_deadline) if seconds is not None else None

    def _on_deadline(self) -> None:
        if self.flow.read_paused and not self.transport.is_closing():  # we are the ones who do not keep up
            self._set_deadline(STALL_SECONDS)
        else:
            self._close()

    def _close(self) -> None:
        """Closes the connection; aborts it if it is closing already, as a close waits for the client."""
        if self.transport.is_closing():
            self.transport.abort()
        else:
            self.transport.close()
            self._set_deadline(ANSWERED_SECONDS)

    def _watch_progress(self, seconds: float) -> None:
        """Checks after a while whether the client has read any of the buffered response."""
        self._stop_watching()
        waiting = self.transport.get_write_buffer_size()
        self._progress_timer = self.loop.call_later(seconds, self._check_progress, waiting, seconds)

    def _check_progress(self, before: int, seconds: float) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting < before:
            self._watch_progress(seconds)
        elif waiting or self.transport.is_closing():
            self.transport.abort()  # a close would wait for the client to read the rest

    def _stop_watching(self) -> None:
        if self._progress_timer is not None:
            self._progress_timer.cancel()
            self._progress_timer = None


class DeviceProtocol(LimitedProtocol):
    """Puts into `scope["state"]` the peer's certificate, `peer_certificate` (DER, or None), and its `peer_address`.

    OpenSSL has verified the certificate up to our CA, but not its dates. The address is that of the connection;
    no header changes it.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls: Any = transport.get_extra_info("ssl_object")
        peer: Any = transport.get_extra_info("peername")
        self.app_state = {
            **self.app_state,
            "peer_certificate": None if tls is None else tls.getpeercert(binary_form=True),
            "peer_address": str(peer[0]) if isinstance(peer, tuple) and peer else "",
        }
