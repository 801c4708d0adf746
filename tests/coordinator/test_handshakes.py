"""Who gets the next handshake: addresses take turns, silent connections take no slot, and slots are released."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.limits.rates import network_of
from coordinator.server.handshakes import SLOTS, SLOTS_PER_ADDRESS, HandshakeScheduler, Slot, SmallTls

pytestmark = pytest.mark.anyio
ONE, OTHER = "127.0.0.1", "127.0.0.2"
MANY = 50


@dataclass
class Served:
    """A scheduler whose connections with a slot are kept open, and nothing else."""

    scheduler: HandshakeScheduler
    port: int
    slots: list[tuple[str, Slot]] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)

    async def serve(self, accepted: socket.socket, slot: Slot) -> None:
        if accepted.recv(1, socket.MSG_PEEK) == b"!":
            raise ConnectionResetError("it has gone")
        self.connections.append(accepted)
        self.slots.append((accepted.getpeername()[0], slot))

    def connect(self, address: str, sends: bytes = b"hello") -> socket.socket:
        connection = socket.create_connection((ONE, self.port), source_address=(address, 0))
        if sends:
            connection.sendall(sends)
        self.connections.append(connection)
        return connection

    def addresses(self) -> list[str]:
        return [address for address, _ in self.slots]

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.005)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop of `fedloop serve`."""
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Served]:
    """Slots are held for ever unless `settings` says otherwise."""
    with socket.socket() as listener:
        listener.bind((ONE, 0))
        scheduler = HandshakeScheduler(
            listener, lambda *args: served.serve(*args), **({"slot_seconds": 3600.0} | settings)
        )
        served = Served(scheduler, listener.getsockname()[1])
        running = asyncio.create_task(scheduler.run())
        await asyncio.sleep(0.01)
        yield served
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for connection in served.connections:
            connection.close()


async def test_one_address_keeps_no_other_out() -> None:
    async with serving() as served:
        for _ in range(MANY):
            served.connect(ONE)
        await served.until(lambda: len(served.slots) == SLOTS_PER_ADDRESS)
        for _ in range(SLOTS - SLOTS_PER_ADDRESS):
            served.connect(OTHER)
        await served.until(lambda: len(served.slots) == SLOTS)
        assert served.addresses() == [ONE] * SLOTS_PER_ADDRESS + [OTHER] * (SLOTS - SLOTS_PER_ADDRESS)


async def test_addresses_take_turns() -> None:
    async with serving() as served:
        for _ in range(MANY):
            served.connect(ONE)
        await served.until(lambda: len(served.slots) == SLOTS_PER_ADDRESS)
        for number in range(2, 2 + MANY):
            served.connect(f"127.0.0.{number}")
        await served.until(lambda: len(served.slots) == SLOTS and len(served.scheduler._turns) == MANY - 1)
        for index in range(3 * SLOTS):
            served.slots[index][1].release()
            await served.until(lambda: len(served.slots) > SLOTS + index)  # noqa: B023
        others = [address for address in served.addresses() if address != ONE]
        assert len(others) == len(set(others)), "none comes again before the rest had its turn"
        assert served.addresses().count(ONE) <= SLOTS_PER_ADDRESS + 1, "it has its turn, like all others"


async def test_a_silent_connection_takes_no_slot_and_is_closed() -> None:
    async with serving(first_byte_seconds=0.2) as served:
        silent = [served.connect(ONE, b"") for _ in range(MANY)]
        served.connect(ONE)
        await served.until(lambda: len(served.slots) == 1)
        for connection in silent:
            connection.settimeout(20)
            assert await asyncio.to_thread(connection.recv, 1) == b""


async def test_a_slot_is_released_once_and_after_its_time() -> None:
    async with serving(slot_seconds=0.05) as served:
        for _ in range(3 * SLOTS):
            served.connect(ONE)
        await served.until(lambda: len(served.slots) == 3 * SLOTS)
        for _, slot in served.slots:
            slot.release()  # too late to count again
        for _ in range(MANY):
            served.connect(ONE)
        await served.until(lambda: len(served.slots) == 3 * SLOTS + MANY)


async def test_a_failed_handshake_releases_its_slot() -> None:
    async with serving() as served:
        for _ in range(3 * SLOTS):
            served.connect(ONE, b"!")
        gone = served.connect(ONE, b"")
        gone.close()
        served.connect(ONE)
        await served.until(lambda: len(served.slots) == 1)


async def test_above_the_limit_one_of_the_address_with_the_most_is_closed() -> None:
    async with serving(max_pending=MANY) as served:
        many = [served.connect(ONE, b"") for _ in range(MANY)]
        await asyncio.sleep(0.05)
        single = served.connect(OTHER, b"")
        many[0].settimeout(20)
        assert await asyncio.to_thread(many[0].recv, 1) == b"", "the one that was silent longest"
        single.sendall(b"hello")
        await served.until(lambda: served.addresses() == [OTHER])


async def test_too_many_open_files_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, iter([OSError(24, "Too many open files")] * 2)

    async def failing(listener: socket.socket) -> Any:
        for failure in failures:
            raise failure
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", failing)
    async with serving() as served:
        served.connect(ONE)
        await served.until(lambda: len(served.slots) == 1)


def test_ipv6_addresses_of_one_network_count_as_one() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8:0:0:ffff::2")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1")
    assert network_of("fe80::1%eth0") == network_of("fe80::2")


async def test_a_connection_that_is_closed_twice_still_works() -> None:
    """As uvicorn does: it closes, is closed again, and then goes on reading the body of a request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls = SmallTls(asyncio.get_running_loop(), asyncio.Protocol(), context, None, server_side=True)
    transport = tls._get_app_transport()
    transport.close()
    transport.close()
    assert transport.is_closing()
    transport.pause_reading()
    transport.resume_reading()
    assert transport.get_write_buffer_size() == 0
