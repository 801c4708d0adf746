"""`fedloop serve`: one process that serves people, devices and runs until it is told to stop.

    1. the home: made, locked, the admin token in it        4. the runs that were under way are taken up
    2. the ports: bound, so that what is told is true       5. both APIs in one event loop
    3. the database: migrated, opened                       6. told to stop: no more requests, held polls end,
                                                               open rounds stay as they are

Killed anywhere instead, it goes on from there when it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import sdnotify
import structlog
import uvicorn
import uvloop

from coordinator.api.deps import ensure_admin_token
from coordinator.app import device_app, operator_app
from coordinator.blobs import Blobs
from coordinator.db.migrations import migrate
from coordinator.db.store import Database
from coordinator.device_api.protocol import DeviceProtocol
from coordinator.errors import UserError
from coordinator.fleets.deployments import Deployment
from coordinator.fleets.device import DeviceFleet
from coordinator.metrics import Metrics
from coordinator.pki import Authority
from coordinator.releases.renewal import ReleaseGauges, keep_fresh
from coordinator.rollouts.service import RolloutThread
from coordinator.runs import RunService
from coordinator.sandbox import enter, policy
from coordinator.serve_options import at_ports
from coordinator.services import Services, utc_now
from coordinator.settings import Settings
from coordinator.signals import Signals
from coordinator.slow_clients import Impatient
from edge_client.files import write_durably

_log = structlog.get_logger("fedloop.serve")

_KEEP_ALIVE_SECONDS = 30
_GRACE_SECONDS = 3
"""For answers under way when the process is told to stop."""
_DAY_SECONDS = 86_400.0
_OPEN_FILES = 65_536

Announce = Callable[[dict[str, Any]], None]
"""Hears once where the coordinator is to be found."""


def serve(settings: Settings, announce: Announce) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        UserError: the home, a port, the database or the CA cannot be had, or a user's code would run unconfined.
    """
    policy.require(settings)
    _raise_open_files()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold the CA's key
    with ExitStack() as stack:
        stack.enter_context(_home(settings.home))
        operator = stack.enter_context(_bound("--operator", settings.operator_host, settings.operator_port))
        device = stack.enter_context(_bound("--device", settings.device_host, settings.device_port))
        settings = at_ports(settings, operator.getsockname()[1], device.getsockname()[1])
        services = stack.enter_context(_services(settings))
        metrics = Metrics(services.database, services.signals)
        services.database.on_commit = metrics.commit
        metrics.add(ReleaseGauges(services.releases, services.clock))
        runs = RunService(services, _fleet_of)
        context = services.authority.server_context()
        servers = (
            _Server(_operator_config(operator_app(services, runs, metrics)), operator),
            _Server(_device_config(device_app(services, metrics), context), device),
        )
        _tell_sandbox(settings)
        runs.start()
        stack.callback(runs.close)
        rollouts = RolloutThread(services, services.releases)
        rollouts.start()
        stack.callback(rollouts.close)
        place = _place(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_told(services, servers, context, lambda: _told(place, settings.home, announce)))


async def _until_told(
    services: Services, servers: tuple[_Server, ...], context: ssl.SSLContext, ready: Callable[[], None]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = [asyncio.create_task(server.serve(sockets=[server.socket])) for server in servers]
    beside = [
        asyncio.create_task(_certificate(services, context)),
        asyncio.create_task(keep_fresh(services.releases, services.clock)),
        asyncio.create_task(_watchdog()),
    ]
    for server, task in zip(servers, serving, strict=True):
        task.add_done_callback(lambda ended: stop.set())  # one that fails ends the other, and is told below
        await asyncio.wait(
            [asyncio.ensure_future(server.is_up.wait()), task], return_when=asyncio.FIRST_COMPLETED
        )
    if not stop.is_set():
        ready()
    await stop.wait()
    sdnotify.SystemdNotifier().notify("STOPPING=1")
    services.signals.close()
    for server in servers:
        server.should_exit = True
    for task in beside:
        task.cancel()
    await asyncio.gather(*serving)


class _Server(uvicorn.Server):
    """One of two servers in a loop: signals are not its own, and it says when it is up."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self.socket = listener
        self.is_up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class _DeviceProtocol(Impatient, DeviceProtocol):
    """Knows the peer's certificate, and does not wait forever."""


def _operator_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(app, http=Impatient, **_common())


def _device_config(app: Any, context: ssl.SSLContext) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_DeviceProtocol,
        ssl_context_factory=lambda config, default: context,
        proxy_headers=False,
        **_common(),
    )


def _common() -> dict[str, Any]:
    return {
        "loop": "none",
        "lifespan": "off",
        "ws": "none",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": _GRACE_SECONDS,
    }


def _fleet_of(services: Services, deployment: Deployment, patience_seconds: float) -> DeviceFleet:
    return DeviceFleet(services, deployment, patience_seconds=patience_seconds)


def _tell_sandbox(settings: Settings) -> None:
    reason = "--no-sandbox" if settings.no_sandbox else enter.missing()
    if reason is None:
        _log.info("sandbox", landlock=enter.landlock_version(), allowed_code=list(settings.allow_code))
    else:
        _log.warning("no_sandbox", reason=reason, allowed_code=list(settings.allow_code))


def _raise_open_files() -> None:
    """A held poll is an open file: a thousand of them and what else there is do not fit the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _home(home: Path) -> Iterator[None]:
    """The home, ours alone: closed to other users, and locked while this process lives."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
        lock = (home / ".lock").open("w")
    except OSError as error:
        raise UserError(f"--home {home}: cannot be used: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--home {home}: another coordinator uses this home; it holds {home / '.lock'}"
            ) from None
        ensure_admin_token(home)
        yield


@contextmanager
def _bound(option: str, host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"{option} {host}:{port}: {error.strerror}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError as error:
            what = "the port is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise UserError(
                f"{option} {host}:{port}: {what}; give another one, or port 0 for any free one"
            ) from None
        yield listener


@contextmanager
def _services(settings: Settings) -> Iterator[Services]:
    migrate(settings.database_url)
    database = Database(settings.database_url)
    with contextlib.closing(database):
        yield Services(
            settings=settings,
            database=database,
            blobs=Blobs(settings.home / "blobs"),
            signals=Signals(),
            authority=Authority.open(settings, utc_now),
        )


def _place(settings: Settings) -> dict[str, Any]:
    def url(scheme: str, host: str, port: int) -> str:
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    return {
        "operator": url("http", settings.operator_host, settings.operator_port),
        "device": url("https", settings.device_host, settings.device_port),
        "device_url": settings.device_url,
        "home": str(settings.home),
        "pid": os.getpid(),
    }


def _told(place: dict[str, Any], home: Path, announce: Announce) -> None:
    write_durably(home / "serve.json", json.dumps(place).encode() + b"\n")
    announce({"event": "serving", **place})
    sdnotify.SystemdNotifier().notify("READY=1")


async def _certificate(services: Services, context: ssl.SSLContext) -> None:
    """Looks once a day whether the server's certificate is to be made anew."""
    while True:
        await asyncio.sleep(_DAY_SECONDS)
        try:
            renewed = await asyncio.to_thread(
                services.authority.refresh_server_certificate, context, services.clock()
            )
        except OSError:
            _log.exception("certificate_not_renewed")
            continue
        if renewed:
            _log.info("certificate_renewed")


async def _watchdog() -> None:
    """Tells systemd, where it asks, that the event loop turns."""
    every = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    notifier = sdnotify.SystemdNotifier()
    while every:
        notifier.notify("WATCHDOG=1")
        await asyncio.sleep(every)
