"""The server of gRPC, in the event loop of its caller.

A client sends the token as metadata, `authorization: Bearer …`; calls about the server itself need none, so that probes can ask. Messages above the limit are refused with
RESOURCE_EXHAUSTED, also those that would only be so when decompressed. If a client vanishes or its deadline passes, the
call is cancelled, and with it its wait in the service.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from coordinator.certificates import read_file
from coordinator.errors import Refusal, UserError
from coordinator.option_parsers import Address
from coordinator.serving.grpc_api import servicer, status
from coordinator.serving.inference import InferenceService

MAX_MESSAGE_BYTES = 64 * 2**20

_OPEN_TO_ALL = frozenset(
    f"/{servicer.NAME}/{call}" for call in ("ServerLive", "ServerReady", "ServerMetadata")
)

_Details: TypeAlias = grpc.HandlerCallDetails
_Continuation: TypeAlias = Callable[[_Details], Awaitable[grpc.RpcMethodHandler]]


@dataclass(frozen=True)
class Tls:
    """Files in PEM: the server's certificate with its chain, and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class GrpcServer:
    """A server that has started. `address`: with the port that it listens on."""

    server: grpc.aio.Server
    address: Address

    async def stop(self, grace_seconds: float) -> None:
        """Takes no further calls, and cancels after `grace_seconds` those that have not ended."""
        await self.server.stop(grace_seconds)


async def start(
    service: InferenceService,
    address: Address,
    *,
    token: str = "",
    tls: Tls | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> GrpcServer:
    """Starts to answer at `address`. `token`: that every call must send; empty: none.

    Raises:
        UserError: the address is taken, or the files of `tls` cannot be used.
    """
    server = grpc.aio.server(
        interceptors=(_BearerToken(token),) if token else (),
        options=(
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ),
    )
    server.add_generic_rpc_handlers((servicer.handler(service),))
    try:
        if tls is None:
            port = server.add_insecure_port(str(address))
        else:
            pair = (read_file(tls.key), read_file(tls.certificate))
            port = server.add_secure_port(str(address), grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise UserError(f"cannot be listened on: {error}") from None
    await server.start()
    return GrpcServer(server, Address(address.host, port))


class _BearerToken(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token, before their messages are read."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: _Continuation, details: _Details
    ) -> grpc.RpcMethodHandler:
        if details.method in _OPEN_TO_ALL:
            return await continuation(details)
        given = dict(details.invocation_metadata or ()).get("authorization")
        if given is None:
            return _refusing(
                Refusal(401, "no_token", "send the token as metadata, authorization: Bearer TOKEN")
            )
        if not hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), self._expected):
            return _refusing(Refusal(401, "bad_token", "this is not the token of this server"))
        return await continuation(details)


def _refusing(refusal: Refusal) -> grpc.RpcMethodHandler:
    async def refuse(_: object, context: grpc.aio.ServicerContext) -> None:
        await status.abort(context, refusal)

    return grpc.stream_stream_rpc_method_handler(refuse)
