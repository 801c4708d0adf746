"""TLS on the device port: handshakes are scheduled, and connections have small buffers.

    silent   an accepted TCP connection waits for its first byte; it costs a file descriptor and no buffer
    queued   connections that have sent something wait their turn: round-robin over addresses, first in, first out within one
    slot     the handshake starts; the slot is released once the first request is in, the connection ends, or a quarter of a
             second has passed

A handshake takes some milliseconds of processor time and then some buffers. A thousand at once would slow down every
device that is connected already, so only a few connections have a slot at a time. One address may hold only some of
the slots, and addresses take turns: an attacker with one address does not keep out devices at others.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import sslproto
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from coordinator.limits.rates import network_of

SLOTS = 6
SLOTS_PER_ADDRESS = 4
SLOT_SECONDS = 0.25
"""After this the next connection gets the slot: the network is slow then, and little data comes through it."""
FIRST_BYTE_SECONDS = 20.0
QUEUE_SECONDS = 60.0
"""Longest wait for a slot after the first byte; the peer has given up by then."""
BACKLOG = 2048
"""Connections that the kernel holds until they are accepted."""
MAX_PENDING = 8192
"""Silent and queued connections. Above it, one of the address with the most of them is closed."""
_RETRY_SECONDS = 0.1

_log = structlog.get_logger("fedloop.http")

HANDSHAKE_SECONDS = 20
SHUTDOWN_SECONDS = 5
"""For the peer to close after we did."""
RECEIVED_BYTES = 32 * 1024
"""Read from a connection at a time. One TLS record, 16 KiB, fits."""


@dataclass(eq=False)
class _Pending:
    """A connection without a slot."""

    socket: socket.socket
    address: str
    timer: asyncio.TimerHandle | None = None


@dataclass
class _Address:
    """The connections of one address that are pending or hold a slot."""

    silent: dict[_Pending, None] = field(default_factory=dict)
    queued: deque[_Pending] = field(default_factory=deque)
    slots: int = 0


class Slot:
    """The right to a handshake. The connection releases it when its first request is in."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Safe to repeat."""
        if self._release is not None:
            release, self._release = self._release, None
            release()


Serve = Callable[[socket.socket, Slot], Awaitable[None]]
"""Starts to serve a connection. Raises: OSError: the handshake failed."""


class HandshakeScheduler:
    """Accepts connections at a listening socket and gives them slots. Belongs to the event loop's thread."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Serve,
        *,
        slot_seconds: float = SLOT_SECONDS,
        first_byte_seconds: float = FIRST_BYTE_SECONDS,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._listener = listener
        self._serve = serve
        self._slot_seconds = slot_seconds
        self._first_byte_seconds = first_byte_seconds
        self._max_pending = max_pending
        self._addresses: dict[str, _Address] = {}
        self._turns: dict[str, None] = {}
        """Addresses with queued connections; the one whose turn is next comes first."""
        self._pending = 0
        self._used_slots = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accepts until cancelled; then closes all pending connections."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        try:
            while True:
                try:
                    connection, peer = await loop.sock_accept(self._listener)
                except OSError as error:  # the peer has gone, or too many files are open
                    _log.warning("not_accepted", reason=error.strerror)
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                self._add(_Pending(connection, network_of(str(peer[0]))))
        finally:
            for address in list(self._addresses.values()):
                for pending in (*address.silent, *address.queued):
                    self._close(pending)
            for task in self._serving:
                task.cancel()

    def _add(self, pending: _Pending) -> None:
        loop = asyncio.get_running_loop()
        if self._pending >= self._max_pending:
            self._make_room()
        self._pending += 1
        self._addresses.setdefault(pending.address, _Address()).silent[pending] = None
        self._set_timer(pending, self._first_byte_seconds)
        loop.add_reader(pending.socket, self._enqueue, pending)

    def _enqueue(self, pending: _Pending) -> None:
        """Called when a silent connection becomes readable."""
        if not _has_data(pending.socket):
            self._close(pending)
            return
        asyncio.get_running_loop().remove_reader(pending.socket)
        address = self._addresses[pending.address]
        del address.silent[pending]
        self._set_timer(pending, QUEUE_SECONDS)
        address.queued.append(pending)
        self._turns.setdefault(pending.address)
        self._assign_slots()

    def _assign_slots(self) -> None:
        while self._used_slots < SLOTS:
            eligible = (name for name in self._turns if self._addresses[name].slots < SLOTS_PER_ADDRESS)
            name = next(eligible, None)
            if name is None:
                return
            address = self._addresses[name]
            pending = address.queued.popleft()
            del self._turns[name]
            if address.queued:
                self._turns[name] = None  # behind all others
            self._assign_slot(pending, address)

    def _assign_slot(self, pending: _Pending, address: _Address) -> None:
        self._set_timer(pending, None)
        self._pending -= 1
        self._used_slots += 1
        address.slots += 1

        def release() -> None:
            timer.cancel()
            self._used_slots -= 1
            address.slots -= 1
            self._forget_if_unused(pending.address)
            self._assign_slots()

        slot = Slot(release)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._slot_seconds, slot.release)
        task = loop.create_task(self._serve_connection(pending.socket, slot))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve_connection(self, connection: socket.socket, slot: Slot) -> None:
        try:
            await self._serve(connection, slot)
        except OSError:
            slot.release()
            connection.close()

    def _make_room(self) -> None:
        """Closes a connection of the address with the most pending ones: the longest silent one, else the newest."""
        largest = max(self._addresses.values(), key=lambda each: len(each.silent) + len(each.queued))
        self._close(next(iter(largest.silent)) if largest.silent else largest.queued[-1])

    def _close(self, pending: _Pending) -> None:
        self._set_timer(pending, None)
        address = self._addresses[pending.address]
        if pending in address.silent:
            asyncio.get_running_loop().remove_reader(pending.socket)
            del address.silent[pending]
        else:
            address.queued.remove(pending)
            if not address.queued:
                del self._turns[pending.address]
        self._pending -= 1
        pending.socket.close()
        self._forget_if_unused(pending.address)

    def _set_timer(self, pending: _Pending, seconds: float | None) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        loop = asyncio.get_running_loop()
        pending.timer = loop.call_later(seconds, self._close, pending) if seconds is not None else None

    def _forget_if_unused(self, name: str) -> None:
        address = self._addresses[name]
        if not (address.silent or address.queued or address.slots):
            del self._addresses[name]


def _has_data(connection: socket.socket) -> bool:
    """Whether the peer has sent something, rather than closed."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


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
