"""`fedloop serve`: one process that serves operators, devices and runs until it is stopped.

    1. home       created, locked, admin token written      4. runs       unfinished ones are resumed
    2. ports      bound before they are announced           5. serving    both APIs in one event loop
    3. database   checked, migrated, opened                 6. stopping   no more requests, long polls end,
                                                                          open rounds stay as they are

Killed at any point, it resumes from there at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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
from sqlalchemy.exc import SQLAlchemyError

from coordinator.accounts.admin_token import ensure_admin_token
from coordinator.accounts.certificate_authority import Authority
from coordinator.context.services import Services, utc_now
from coordinator.context.signals import Signals
from coordinator.db.migrations import migrate
from coordinator.db.store import Database, require_intact
from coordinator.errors import UserError
from coordinator.fleets.device_relayed import device_fleet
from coordinator.identity.setup_links import LINK_FILE, offer_setup_link
from coordinator.jobs.service import JobService
from coordinator.oidc.configuration import configuration_of
from coordinator.output_folders import locked
from coordinator.releases.renewal import ReleaseGauges, keep_fresh
from coordinator.rollouts.controller import RolloutThread
from coordinator.runs.service import RunService
from coordinator.sandbox import enter, policy
from coordinator.server.app import device_app, operator_app
from coordinator.server.audit_log import keep_head, record_start
from coordinator.server.handshakes import HandshakeScheduler, Slot, over_tls
from coordinator.server.http_protocol import DeviceProtocol, LimitedProtocol
from coordinator.server.listening import bound_socket
from coordinator.server.metrics import Metrics
from coordinator.settings import Settings
from coordinator.storage.blobs import Blobs
from coordinator.storage.errors import describe, is_temporary
from edge_client.files import write_durably

_log = structlog.get_logger("fedloop.serve")

_KEEP_ALIVE_SECONDS = 30
_GRACE_SECONDS = 3
"""For responses in progress when the process is stopped."""
_DAY_SECONDS = 86_400.0
_OPEN_FILES = 65_536
_TRIM_AFTER_CONNECTIONS = 100
"""Closed connections that free enough memory to be worth returning to the system."""

Announce = Callable[[dict[str, Any]], None]
"""Called once with the coordinator's addresses."""


def serve(settings: Settings, announce: Announce) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        UserError: the home, a port, the database or the CA is unusable, or a user's code would run unconfined.
    """
    policy.require(settings)
    configuration_of(settings)
    _raise_open_files()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold the CA's key
    with ExitStack() as stack:
        with _startup_failures(settings.home):
            stack.enter_context(_locked_home(settings.home))
            operator = stack.enter_context(bound_socket("--operator", settings.operator))
            device = stack.enter_context(bound_socket("--device", settings.device))
            settings = settings.with_ports(operator.getsockname()[1], device.getsockname()[1])
            services = stack.enter_context(_open_services(settings))
            metrics = Metrics(services.database, services.signals)
            services.database.on_commit = metrics.commit
            metrics.add(ReleaseGauges(services.releases, services.clock))
            runs = RunService(
                services,
                lambda own, deployment, patience: device_fleet(own, deployment, patience_seconds=patience),
            )
            jobs = JobService(services)
            context = services.authority.server_context()
            servers = (
                _Server(_config(operator_app(services, runs, metrics, jobs), LimitedProtocol), operator),
                _Server(
                    _config(
                        device_app(services, metrics),
                        DeviceProtocol,
                        ssl_context_factory=lambda config, default: context,
                        proxy_headers=False,
                    ),
                    device,
                ),
            )
            _log_sandbox(settings)
            record_start(services)
            runs.start()
            stack.callback(runs.close)
            jobs.start()
            stack.callback(jobs.close)
            rollouts = RolloutThread(services, services.releases)
            rollouts.start()
            stack.callback(rollouts.close)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                _serve_until_stopped(services, servers, context, lambda: _announce(services, announce))
            )


@contextmanager
def _startup_failures(home: Path) -> Iterator[None]:
    """Turns a failure of disk or database that the operator can fix into a `UserError`."""
    try:
        yield
    except (OSError, SQLAlchemyError) as error:
        if not is_temporary(error):
            raise
        raise UserError(f"--home {home}: cannot start: {describe(error, home)}, then start again") from None


async def _serve_until_stopped(
    services: Services, servers: tuple[_Server, ...], context: ssl.SSLContext, ready: Callable[[], None]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = [asyncio.create_task(server.serve(sockets=[server.socket])) for server in servers]
    background = [
        asyncio.create_task(_renew_certificate(services, context)),
        asyncio.create_task(keep_fresh(services.releases, services.clock)),
        asyncio.create_task(keep_head(services)),
        asyncio.create_task(_watchdog()),
        asyncio.create_task(_return_freed_memory(servers)),
    ]
    for server, task in zip(servers, serving, strict=True):
        task.add_done_callback(
            lambda ended: stop.set()
        )  # if one fails, the other stops, and `gather` raises below
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
    for task in background:
        task.cancel()
    await asyncio.gather(*serving)


class _Server(uvicorn.Server):
    """One of two servers in a loop: leaves signals to the process, and signals when it is up."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self.socket = listener
        self.is_up = asyncio.Event()
        self._accepting: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            scheduler = HandshakeScheduler(self.socket, over_tls(self.config.ssl, self._protocol))
            self._accepting = asyncio.create_task(scheduler.run())
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    def _protocol(self, slot: Slot) -> asyncio.Protocol:
        protocol = DeviceProtocol(self.config, self.server_state, self.lifespan.state)
        protocol.on_request_done = slot.release
        return protocol


def _config(app: Any, protocol: type[LimitedProtocol], **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        loop="none",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        **more,
    )


def _log_sandbox(settings: Settings) -> None:
    reason = "--no-sandbox" if settings.no_sandbox else enter.unavailable_reason()
    if reason is None:
        _log.info("sandbox", landlock=enter.landlock_version(), allowed_code=list(settings.allow_code))
    else:
        _log.warning("no_sandbox", reason=reason, allowed_code=list(settings.allow_code))


def _raise_open_files() -> None:
    """A long poll holds an open file: a thousand of them and all others exceed the usual limit of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _locked_home(home: Path) -> Iterator[None]:
    """Creates the home, closed to other users, and locks it for the life of this process."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.chmod(0o700)
    path = home / ".lock"
    with locked(path, UserError(f"--home {home}: another coordinator uses this home; it holds {path}")):
        ensure_admin_token(home)
        yield


@contextmanager
def _open_services(settings: Settings) -> Iterator[Services]:
    require_intact(settings.database_url, settings.home)
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


def _announce(services: Services, announce: Announce) -> None:
    settings = services.settings
    addresses = {
        "operator": f"http://{settings.operator}",
        "device": f"https://{settings.device}",
        "device_url": settings.device_url,
        "home": str(settings.home),
        "pid": os.getpid(),
    }
    with _startup_failures(settings.home):
        write_durably(settings.home / "serve.json", json.dumps(addresses).encode() + b"\n")
        link = offer_setup_link(
            settings.home, f"http://{settings.operator}", services.database, services.clock()
        )
    announce({"event": "serving", **addresses})
    if link is not None:
        where = str(settings.home / LINK_FILE)
        _log.info("no_users_yet", setup_link_in=where)  # not the link: it is a secret
    sdnotify.SystemdNotifier().notify("READY=1")


async def _renew_certificate(services: Services, context: ssl.SSLContext) -> None:
    """Renews the server's certificate when it is due; checks once a day."""
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
    """Tells systemd, if it asks for it, that the event loop runs."""
    every = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    notifier = sdnotify.SystemdNotifier()
    while every:
        notifier.notify("WATCHDOG=1")
        await asyncio.sleep(every)


async def _return_freed_memory(servers: tuple[_Server, ...]) -> None:
    """Returns memory to the system after many connections have closed: glibc keeps their small freed blocks."""
    glibc = ctypes.CDLL(None)
    peak = 0
    while hasattr(glibc, "malloc_trim"):
        await asyncio.sleep(1.0)
        open_connections = sum(len(server.server_state.connections) for server in servers)
        peak = max(peak, open_connections)
        if peak - open_connections >= _TRIM_AFTER_CONNECTIONS:
            peak = open_connections
            await asyncio.to_thread(glibc.malloc_trim, 0)
