"""HTTP for the device API: uvicorn's own, which also tells each request who is at the other end of its connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class DeviceProtocol(HttpToolsProtocol):
    """Puts into `scope["state"]` the peer's certificate, `peer_certificate` (DER, or None), and its `peer_address`.

    The certificate was verified by OpenSSL up to our CA, its dates were not. The address is that of the connection,
    which no header changes.
    """

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the API's own form, and the connection ends."""
        body = json.dumps({"error": {"code": "malformed", "message": msg}}).encode()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls: Any = transport.get_extra_info("ssl_object")
        peer: Any = transport.get_extra_info("peername")
        self.app_state = {
            **self.app_state,
            "peer_certificate": None if tls is None else tls.getpeercert(binary_form=True),
            "peer_address": str(peer[0]) if isinstance(peer, tuple) and peer else "",
        }
