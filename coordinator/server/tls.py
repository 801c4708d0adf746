"""TLS on accepted connections, with small buffers."""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from coordinator.server.handshakes import Serve, Slot

HANDSHAKE_SECONDS = 20
SHUTDOWN_SECONDS = 5
"""For the peer to close after we did."""
RECEIVED_BYTES = 32 * 1024
"""Read from a connection at a time. One TLS record, 16 KiB, fits."""


class SmallTls(sslproto.SSLProtocol):
    """asyncio's TLS. uvloop's reads 256 KiB at a time and keeps buffers of that size.

    Data that a connection sends and nobody reads takes about 50 KB here, and 0.9 MB with uvloop's. One buffer serves all
    connections: the transport's data is copied out before the loop turns to another one.
    """

    max_size = RECEIVED_BYTES
    _received = bytearray(RECEIVED_BYTES)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ssl_buffer = self._received
        self._ssl_buffer_view = memoryview(self._received)
        self._set_read_buffer_limits(high=RECEIVED_BYTES)  # type: ignore[attr-defined]  # 256 KiB by default, while nobody reads

    def _get_app_transport(self) -> Any:
        transport: Any = self._app_transport
        if transport is None:
            transport = self._app_transport = _Transport(self._loop, self)
        return transport


class _Transport(sslproto._SSLProtocolTransport):
    """May be closed repeatedly. After a second close, asyncio's forgets its connection and every later call raises."""

    def close(self) -> None:
        if not self.is_closing():
            super().close()


def over_tls(context: ssl.SSLContext, protocol: Callable[[Slot], asyncio.Protocol]) -> Serve:
    """Serves a connection by a handshake and then the protocol that `protocol` makes, which releases the slot."""

    async def serve(connection: socket.socket, slot: Slot) -> None:
        loop = asyncio.get_running_loop()
        handshake = loop.create_future()
        tls = SmallTls(
            loop,
            protocol(slot),
            context,
            handshake,
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )
        await loop.connect_accepted_socket(lambda: tls, connection)
        await handshake

    return serve
