"""HTTP for the device API: adds the peer's certificate and address to each request."""

from __future__ import annotations

import asyncio
from typing import Any

from coordinator.server.http_protocol import LimitedProtocol


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
