"""`fedloop serving start`: one process that serves deployments until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sdnotify
import uvicorn
import uvloop

from coordinator.errors import UserError
from coordinator.operator.client import OperatorClient
from coordinator.option_parsers import Address
from coordinator.output_folders import locked
from coordinator.server.http_protocol import LimitedProtocol
from coordinator.server.listening import bound_socket
from coordinator.serving.deployments import DeploymentSection
from coordinator.serving.front import Front, Limits
from coordinator.serving.manager import DeploymentManager
from coordinator.serving.paths import ADDRESS_FILE, TOKEN_FILE
from coordinator.serving.rows import Form
from coordinator.serving.service import Serving
from coordinator.serving.versions import Versions
from edge_client.files import read_regular, write_durably
from edge_client.processes.unneeded_memory import release_library_pages, trim_heap

if TYPE_CHECKING:
    from coordinator.datacenter.predictions import Model
    from coordinator.serving.grpc_api.server import GrpcServer

DEFAULT_LISTEN = Address("127.0.0.1", 8090)
_KEEP_ALIVE_SECONDS = 60
_GRACE_SECONDS = 30
_GRPC_GRACE_SECONDS = 5  # the service has answered everything by then; an open stream may not end by itself
_LEAST_TOKEN = 16


@dataclass(frozen=True)
class ServerSettings:
    """How a server listens. `token_file`: with what requests for predictions must send; None: on loopback nothing.

    `grpc`: where gRPC is answered; None: nowhere. `memory_bytes`: of all workers; 0: no limit. `follow_seconds`: between two looks at what a reference to the registry means.
    """

    home: Path
    listen: Address = DEFAULT_LISTEN
    token_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    allowed_code: tuple[str, ...] = ()
    follow_seconds: float = 2.0
    grpc: Address | None = None
    memory_bytes: int = 0


def serve(
    settings: ServerSettings,
    deployments: Mapping[str, DeploymentSection],
    connect: Callable[[], OperatorClient],
    open_model: Callable[[Path], Model],
    announce: Callable[[dict[str, Any]], None],
) -> None:
    """Serves until SIGTERM or SIGINT. `connect`, `open_model`: as `Versions` takes them; `announce`: called once with the address.

    Raises:
        UserError: the home, the port, a certificate or a token is unusable, or it would listen off loopback without them.
    """
    token = _read_token(settings)
    # A large body is millions of objects: by default the garbage collector goes through all of the process's several times meanwhile.
    gc.freeze()
    release_library_pages()
    gc.set_threshold(50_000, 20, 100)
    with ExitStack() as stack:
        home = settings.home
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            home.chmod(0o700)
            lock = home / ".lock"
            stack.enter_context(
                locked(lock, UserError(f"--home {home}: another server uses this home; it holds {lock}"))
            )
            management = _management_token(home)
        except OSError as error:
            raise UserError(f"--home {home}: cannot be used: {error.strerror}") from None
        listener = stack.enter_context(bound_socket("--listen", settings.listen))
        address = Address(settings.listen.host, listener.getsockname()[1])
        versions = Versions(home, connect, open_model, settings.allowed_code)
        scheme = "https" if settings.certificate else "http"
        addresses = {"url": f"{scheme}://{address}", "home": str(home), "pid": os.getpid()}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                _serve(
                    settings,
                    Serving(
                        DeploymentManager(
                            home, versions, Form, settings.follow_seconds, settings.memory_bytes
                        )
                    ),
                    deployments,
                    Limits(token=token, management_token=management),
                    listener,
                    lambda more: _announce(home, {**addresses, **more}, announce),
                )
            )


async def _serve(
    settings: ServerSettings,
    serving: Serving,
    deployments: Mapping[str, DeploymentSection],
    limits: Limits,
    listener: Any,
    ready: Callable[[dict[str, Any]], None],
) -> None:
    """`ready` gets what is known of addresses only now."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config = uvicorn.Config(
        Front(serving, limits),
        http=LimitedProtocol,
        loop="none",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        ssl_certfile=None if settings.certificate is None else str(settings.certificate),
        ssl_keyfile=None if settings.key is None else str(settings.key),
    )
    server = _Server(config)
    grpc = await _start_grpc(settings, serving, limits)
    starting = asyncio.create_task(serving.manager.start(deployments))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([starting, running, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            ready({} if grpc is None else {"grpc": str(grpc.address)})
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        sdnotify.SystemdNotifier().notify("STOPPING=1")
        starting.cancel()
        await serving.manager.close()
        if grpc is not None:
            await grpc.stop(_GRPC_GRACE_SECONDS)
        server.should_exit = True
        await asyncio.gather(running, return_exceptions=True)


async def _start_grpc(settings: ServerSettings, serving: Serving, limits: Limits) -> GrpcServer | None:
    if settings.grpc is None:
        return None
    from coordinator.serving.grpc_api import server as grpc

    tls = None
    if settings.certificate is not None and settings.key is not None:
        tls = grpc.Tls(settings.certificate, settings.key)
    try:
        return await grpc.start(
            serving, settings.grpc, token=limits.token, tls=tls, max_message_bytes=limits.body_bytes
        )
    except UserError as error:
        raise UserError(f"--grpc {settings.grpc}: {error}") from None


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _announce(home: Path, addresses: dict[str, Any], announce: Callable[[dict[str, Any]], None]) -> None:
    trim_heap()  # of the documents of models and deployments
    write_durably(home / ADDRESS_FILE, json.dumps(addresses).encode() + b"\n")
    announce({"event": "serving", **addresses})
    sdnotify.SystemdNotifier().notify("READY=1")


def _read_token(settings: ServerSettings) -> str:
    """The token for predictions; empty if none is needed.

    Raises:
        UserError: off loopback without a token or TLS; or the files are unusable.
    """
    if (settings.certificate is None) != (settings.key is None):
        raise UserError("--tls-cert and --tls-key belong together: give both")
    if settings.certificate is not None and settings.key is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                settings.certificate, settings.key
            )
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"--tls-cert {settings.certificate}, --tls-key {settings.key}: cannot be used: {error}"
            ) from None
    for option, address in (("--listen", settings.listen), ("--grpc", settings.grpc)):
        if address is None or address.is_loopback:
            continue
        if settings.certificate is None or settings.token_file is None:
            raise UserError(
                f"{option} {address}: is not loopback, so others could reach it: give --tls-cert, --tls-key and --token-file"
            )
    if settings.token_file is None:
        return ""
    try:
        token = read_regular(settings.token_file).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {settings.token_file}: cannot be read: {error}") from None
    if len(token) < _LEAST_TOKEN or not token.isascii() or any(each.isspace() for each in token):
        raise UserError(
            f"--token-file {settings.token_file}: expected one token of at least {_LEAST_TOKEN} ASCII characters, such as of "
            "`openssl rand -hex 32`"
        )
    return token


def _management_token(home: Path) -> str:
    """The token of the commands that manage deployments; made at the first start, readable by its user only."""
    path = home / TOKEN_FILE
    with contextlib.suppress(FileNotFoundError):
        return read_regular(path).decode().strip()
    token = secrets.token_urlsafe(32)
    write_durably(path, token.encode() + b"\n", mode=0o600)
    return token
