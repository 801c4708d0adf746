"""The relay's process: serves devices in threads, and itself checks in for rounds to fold.

    begin: identity ─► certificate for devices ─► serve
    loop:  renew what is due ─► check in ─► fold and upload, if there is something to fold ─► wait

Like the daemon it may be killed at any point: what a device was told is on disk, and the coordinator asks again for what is missing.
"""

from __future__ import annotations

import signal
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TypeVar

import sdnotify

from edge_client.config import EdgeConfig
from edge_client.daemon import status
from edge_client.daemon.heartbeat import ShutdownRequested, heartbeat
from edge_client.daemon.host_environment import HostEnvironment, log_line, software_version
from edge_client.daemon.membership import FINAL, Membership
from edge_client.errors import Stopped, UserError
from edge_client.files import make_folder
from edge_client.relay.certificate import ServerCertificate
from edge_client.relay.folding import CannotFold, fold
from edge_client.relay.intermediary import CONNECTIONS, Intermediary
from edge_client.relay.server import RelayServer
from edge_client.relay.updates import KeptUpdates
from edge_client.relay.uploads import Uploads
from edge_client.transport.failures import CertificateExpired, RetrySchedule, ServerRefused, Unreachable
from edge_client.transport.link import Link, parse_answer, pinned_context, upload
from edge_client.wire.device import WIRE, CheckIn, CheckInAnswer, Decline, TaskOffer, UploadStart
from edge_client.wire.relays import URL_LABEL, FoldRequest
from edge_client.wire.strict import InvalidDocument, parse_message

HOLD_SECONDS = 50.0
_LONGEST_PAUSE_SECONDS = 30.0
"""A run that begins finds the relay within this time, also in a large fleet."""
_HELD_PAUSE_SECONDS = 0.02

T = TypeVar("T")


def run(config: EdgeConfig, address: tuple[str, int]) -> None:
    """Works until a signal ends it. The caller holds the lock of the state folder.

    Raises:
        UserError: not enrolled, not as a relay, or the address cannot be used.
        Stopped: the coordinator no longer accepts this relay.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise ShutdownRequested

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    notify = sdnotify.SystemdNotifier().notify
    host = HostEnvironment(
        ineligible=lambda: (), datasets=dict, runtimes={}, models=(), notify=notify, log=log_line
    )
    with suppress(ShutdownRequested):
        Relay(config, host, address).run()


class Relay:
    """One relay. `run` works until a signal handler raises ShutdownRequested."""

    def __init__(self, config: EdgeConfig, host: HostEnvironment, address: tuple[str, int]) -> None:
        folder = config.state_dir / "relay"
        make_folder(folder)
        self._config = config
        self._host = host
        self._address = address
        self._folder = folder
        self._status = status.Writer(config.state_dir, host.wall, host.notify, host.log)
        self._membership = Membership(config, host, self._status.note)
        self._retry = RetrySchedule(host.now, host.rng)
        self._kept = KeptUpdates(folder / "updates", host.wall)
        self._devices_link: Link | None = None
        self._hold = False
        self._url = ""

    def run(self) -> None:
        self._membership.begin()
        identity = self._membership.identity
        self._status.write("starting", f"relay {identity.device} of {self._membership.url}")
        certificate = ServerCertificate(self._folder, identity.ca_pem)
        self._until_reached(lambda: self._renew(certificate, None))
        server, context = self._serve(certificate)
        self._host.notify("READY=1")
        try:
            while True:
                self._until_reached(lambda: self._tick(certificate, context))
        finally:
            server.shutdown()
            server.server_close()
            self._host.notify("STOPPING=1")
            self._status.write("stopped", "ended")

    def _serve(self, certificate: ServerCertificate) -> tuple[RelayServer, ssl.SSLContext]:
        context = certificate.context()
        intermediary = Intermediary(self._link, self._folder / "blobs")
        uploads = Uploads(intermediary, self._kept, self._config.outbox_bytes, self._host.log)
        try:
            server = RelayServer(self._address, context, intermediary, uploads)
        except OSError as error:
            where = f"{self._address[0]}:{self._address[1]}"
            raise UserError(f"--listen {where}: {error.strerror or error}; choose another address") from None
        host = certificate.name()
        self._url = f"https://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, name="server", daemon=True).start()
        self._host.log(f"serves devices at {self._url}")
        return server, context

    def _link(self) -> Link:
        """The connection on which devices' requests are forwarded."""
        assert self._devices_link is not None
        return self._devices_link

    def _tick(self, certificate: ServerCertificate, context: ssl.SSLContext) -> None:
        self._renew(certificate, context)
        message = self._checkin(HOLD_SECONDS if self._hold else 0.0)
        answered = self._membership.link.post("/checkin", message, wait_seconds=message.wait_seconds)
        answer = parse_answer(CheckInAnswer, answered)
        self._membership.update_clock(answered.date)
        self._retry.succeeded()
        self._status.reached()
        self._hold = answer.hold
        if answer.task is not None:
            self._fold(answer.task)
            return
        self._status.write("holding" if self._hold else "idle", "serves devices")
        time.sleep(
            _HELD_PAUSE_SECONDS if self._hold else min(max(1.0, answer.next_seconds), _LONGEST_PAUSE_SECONDS)
        )

    def _renew(self, certificate: ServerCertificate, context: ssl.SSLContext | None) -> None:
        """Renews both certificates where that is due. `context`: uses that for devices."""
        before = self._membership.identity
        if self._membership.expired or self._membership.date() >= self._membership.renew_at:
            self._membership.renew(
                self._membership.expired,
                lambda: self._status.write("renewing", "requests the next certificate"),
            )
        if self._devices_link is None or self._membership.identity != before:
            identity = self._membership.identity
            self._devices_link = Link(
                self._membership.url,
                pinned_context(identity.ca_pem, identity.credentials),
                proxy=self._config.proxy,
                connections=CONNECTIONS,
            )
        if certificate.is_due(self._membership.date()):
            certificate.renew(self._membership.link)
            if context is not None:
                certificate.load_into(context)

    def _checkin(self, wait_seconds: float, working_on: str | None = None) -> CheckIn:
        return CheckIn(
            wire=f"{WIRE[0]}.{WIRE[1]}",
            software=software_version(),
            runtimes={},
            memory_bytes=0,
            device_class="relay",
            labels={**self._config.labels, URL_LABEL: self._url},
            working_on=working_on,
            wait_seconds=wait_seconds,
        )

    def _fold(self, offer: TaskOffer) -> None:
        """Does one task to fold. Raises: ServerRefused, Unreachable: it stays, and is offered again."""
        link, path = self._membership.link, self._folder / "folded"
        try:
            if offer.kind != "fold":
                raise CannotFold(f"this is a relay, which does not {offer.kind}")
            request = parse_message(FoldRequest, offer.message, "task")
            about = f"{offer.run_name}, round {offer.round}: {len(request.members)} updates"
            self._status.write("folding", about)
            with heartbeat(link, self._checkin(0.0, offer.task), offer.lease_seconds):
                digest = fold(request, offer.task, self._kept, path)
                size = path.stat().st_size
                upload(link, offer.task, path, UploadStart(size, digest, size))
        except (CannotFold, InvalidDocument) as error:
            self._status.note(f"{offer.run_name}, round {offer.round} not folded: {error}")
            link.post(f"/tasks/{offer.task}/decline", Decline("failed", str(error)[:200]))
            return
        except ServerRefused as refused:
            if refused.is_transient or refused.status == 401:
                raise
            self._status.note(f"{offer.run_name}, round {offer.round} not passed on: {refused}")
            return
        finally:
            path.unlink(missing_ok=True)
        self._kept.forget(offer.run, offer.round)
        self._status.note(f"{about} passed on in {size} bytes")

    def _until_reached(self, act: Callable[[], T]) -> T:
        """What `act` returns, once the coordinator answers."""
        while True:
            try:
                return act()
            except CertificateExpired:
                self._membership.expired = True
                error: Exception = Unreachable(
                    "the coordinator says that this relay's certificate has expired"
                )
            except (Unreachable, ServerRefused) as problem:
                error = problem
            except OSError as problem:
                error = Unreachable(f"this relay's disk: {problem}")
            if isinstance(error, ServerRefused):
                self._require_member(error)
            self._retry.failed(getattr(error, "retry_after", None), expected_back=self._hold)
            wait_seconds = max(0.0, self._retry.at - self._host.now())
            self._status.write("unreachable", f"{error}; tries again in {wait_seconds:.0f} s")
            time.sleep(wait_seconds)

    def _require_member(self, refused: ServerRefused) -> None:
        if refused.code in FINAL:
            raise Stopped(f"the coordinator no longer accepts this relay: {refused.message} ({refused.code})")
        if refused.code == "no_relay":
            raise UserError(
                "this device is not enrolled as a relay; leave, and enroll with a token of "
                "`fedloop device token --relay-name HOST`"
            )
        if refused.code in ("expired", "not_yet_valid"):
            self._membership.expired = True
