"""Who opens connections and then hardly speaks, or does not listen, does not keep others from being served."""

from __future__ import annotations

import http.client
import json
import resource
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from coordinator.db.store import Database
from coordinator.demos.local_fleet import local_fleet
from coordinator.limits import request_bodies
from coordinator.server import http_protocol
from coordinator.server.http_protocol import LimitedProtocol
from tests.support.device_client import RawDevice, checkin, request
from tests.support.device_world import serving
from tests.support.long import LONG
from tests.support.stranger import Port, seconds_until_closed, unfinished

SOCKETS = 500 if LONG else 100
CLOSED_SECONDS = 120.0
MIB = 2**20


@pytest.mark.slow
@pytest.mark.long
def test_slow_sockets_keep_no_device_out_and_are_closed(tmp_path: Path, served_on: Mapping[str, str]) -> None:
    with ExitStack() as stack:
        stack.enter_context(open_files(256))  # the coordinator helps itself to more
        fleet = stack.enter_context(local_fleet(tmp_path, environment=served_on))
        stack.enter_context(open_files(4096))
        process = psutil.Process(fleet.coordinator.pid)
        before = process.memory_info().rss
        slow = [stack.enter_context(slow_socket(fleet.device_url)) for _ in range(SOCKETS)]
        token = fleet.client.post("/tokens", {})["token"]
        device = RawDevice.enrol(fleet.device_url, token, tmp_path / "raw")
        assert device.check_in(checkin("digits")).status == 200
        assert process.memory_info().rss - before < 150 * MIB  # TLS buffers, some 100 KB each
        say_nothing_more_and_wait(slow)
        assert device.check_in(checkin("digits")).status == 200


def slow_socket(url: str) -> ssl.SSLSocket:
    """A connection that began a request, whose headers never end."""
    parts = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connected = context.wrap_socket(socket.create_connection((parts.hostname, parts.port), 60))
    connected.sendall(b"GET /device/v1/ca HTTP/1.1\r\n")
    return connected


def say_nothing_more_and_wait(slow: list[ssl.SSLSocket]) -> None:
    """Until the other end has closed all of them."""
    open_ones, end = set(slow), time.monotonic() + CLOSED_SECONDS
    while open_ones and time.monotonic() < end:
        for ready in select.select(list(open_ones), [], [], 1.0)[0]:
            if gone(ready):
                open_ones.remove(ready)
    assert not open_ones


def gone(connected: ssl.SSLSocket) -> bool:
    connected.setblocking(False)
    try:
        return connected.recv(4096) == b""
    except ssl.SSLWantReadError:
        return False
    except OSError:
        return True


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    """How many this process may have open, and what it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


ANSWER = bytes(32 * MIB)
IN_ONE = bytes(8 * MIB)


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/in-one":  # the application is done before the other end took any of it
        await send({"type": "http.response.body", "body": IN_ONE})
        return
    for at in range(0, len(ANSWER), MIB):
        await send({"type": "http.response.body", "body": ANSWER[at : at + MIB], "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[uvicorn.Server]:
    """A server whose patience is short, of an answer that no kernel buffers whole."""
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(http_protocol, "ANSWERED_SECONDS", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    made = uvicorn.Server(uvicorn.Config(large, http=LimitedProtocol, lifespan="off", log_level="error"))
    thread = threading.Thread(target=made.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not made.started:
        time.sleep(0.01)
    yield made
    made.should_exit = True
    thread.join()
    listener.close()


def requested(server: uvicorn.Server, path: str = "/", line: str = "connection: close") -> socket.socket:
    connected = socket.socket()
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    connected.settimeout(60)
    connected.connect(server.servers[0].sockets[0].getsockname())
    connected.sendall(f"GET {path} HTTP/1.1\r\nhost: here\r\n{line}\r\n\r\n".encode())
    return connected


def taken(connected: socket.socket) -> int:
    """Bytes until the end, whatever end that is."""
    received = 0
    with suppress(ConnectionError):
        while block := connected.recv(MIB):
            received += len(block)
    return received


def test_an_answer_that_nobody_takes_is_given_up(server: uvicorn.Server) -> None:
    with requested(server) as connected:
        assert connected.recv(1)
        end = time.monotonic() + CLOSED_SECONDS
        while server.server_state.connections and time.monotonic() < end:
            time.sleep(0.05)
        assert taken(connected) < len(ANSWER) / 2


@pytest.mark.parametrize("line", ["connection: close", "connection: keep-alive"])
def test_an_answer_that_nobody_reads_is_given_up(server: uvicorn.Server, line: str) -> None:
    with requested(server, "/in-one", line) as connected:
        assert connected.recv(1)
        end = time.monotonic() + CLOSED_SECONDS
        while server.server_state.connections and time.monotonic() < end:
            time.sleep(0.05)
        assert not server.server_state.connections
        assert taken(connected) < len(IN_ONE)


@pytest.mark.slow
def test_a_slowly_read_answer_arrives_complete(server: uvicorn.Server) -> None:
    with requested(server) as connected:
        received = 0
        for _ in range(6):
            received += len(connected.recv(4 * MIB, socket.MSG_WAITALL))
            time.sleep(0.2)  # slower than it could be, and never silent for as long as the patience lasts
        assert received + taken(connected) > len(ANSWER)


@pytest.mark.slow
def test_a_message_has_so_long_to_come(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_bodies, "ANONYMOUS_SECONDS", 0.5)
    with serving(tmp_path, database) as world:
        host, _, port = world.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), 60) as connected:
            connected.sendall(request("POST", "/enrol", b"{", length="1000"))
            answer = http.client.HTTPResponse(connected)
            answer.begin()
            assert answer.status == 408
            assert json.loads(answer.read())["error"]["code"] == "too_slow"
            assert seconds_until_closed([connected], CLOSED_SECONDS, drips=True) < CLOSED_SECONDS


def test_a_stranger_sends_no_more_than_a_csr_and_a_token_need(tmp_path: Path, database: Database) -> None:
    chunk = b"%x\r\n%s\r\n" % (
        request_bodies.ANONYMOUS_LIMIT_BYTES + 1,
        b"x" * (request_bodies.ANONYMOUS_LIMIT_BYTES + 1),
    )
    with serving(tmp_path, database) as world:
        at = Port(world.url)
        for path in ("/enrol", "/renew"):
            for content in (
                request("POST", path, b"{", length=str(request_bodies.ANONYMOUS_LIMIT_BYTES + 1)),
                request("POST", path, None, [("Transfer-Encoding", "chunked")]) + chunk,
            ):
                with at.connected() as line:
                    line.sendall(content)
                    assert line.recv(4096).split()[1] == b"413"  # although more is to come


REFUSED = (
    ("device", "/device/v1/checkin", 401),
    ("device", "/device/v1/nowhere", 404),
    ("device", "/device/v1/enrol", 413),
    ("operator", "/api/v1/tokens", 401),
    ("operator", "/nowhere", 404),
)


@pytest.mark.extended
@pytest.mark.slow
def test_answered_requests_whose_body_never_ends_are_closed_within_seconds(
    tmp_path: Path, served_on: Mapping[str, str]
) -> None:
    with ExitStack() as stack:
        stack.enter_context(open_files(4096))
        fleet = stack.enter_context(local_fleet(tmp_path, environment=served_on))
        token = fleet.client.post("/tokens", {})["token"]
        device = RawDevice.enrol(fleet.device_url, token, tmp_path / "raw")
        process = psutil.Process(fleet.coordinator.pid)
        rest = process.memory_info().rss
        slow = []
        for port, path, status in REFUSED:
            at = Port(fleet.device_url if port == "device" else fleet.operator_url)
            lines = [stack.enter_context(at.connected()) for _ in range(SOCKETS // len(REFUSED))]
            for line in lines:
                line.sendall(unfinished(path))
            assert int(lines[0].recv(4096).split()[1]) == status
            slow += lines
        assert device.check_in(checkin("digits")).status == 200
        seconds_until_closed(slow[::2], 30.0, drips=True)
        seconds_until_closed(slow[1::2], 30.0, drips=False)
        assert process.memory_info().rss - rest < 64 * MIB
        assert device.check_in(checkin("digits")).status == 200
