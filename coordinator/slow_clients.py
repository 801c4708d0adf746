"""Connections that take too long to say what they want are closed, so that they cannot use up the server."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 20.0
"""From the opening of a connection, or the first byte of a further request, to the end of the headers."""
STALL_SECONDS = 60.0
"""Without a byte of a body that is due, or of an answer that is taken."""


class Impatient(HttpToolsProtocol):
    """uvicorn's protocol, which itself limits idle connections only."""

    _patience: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        self._stop_watching()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._wait_for(HEADER_SECONDS)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._wait_for(STALL_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._wait_for(STALL_SECONDS)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._wait_for(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch(self) -> None:
        """Looks in a while whether the other end took any of what waits for it."""
        waiting = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(STALL_SECONDS, self._look, waiting)

    def _look(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch()
        else:
            self.transport.abort()  # to close would wait for the rest to be taken

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _wait_for(self, seconds: float | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(seconds, self._give_up) if seconds is not None else None

    def _give_up(self) -> None:
        if self.flow.read_paused:  # it is we who do not keep up
            self._wait_for(STALL_SECONDS)
        elif not self.transport.is_closing():
            self.transport.close()
