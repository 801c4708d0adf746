"""Frames between a parent and its worker process, over a socket pair.

A frame is a JSON object and any number of byte strings. Layout: the length of the head (4 bytes, big-endian) and of the blobs (8 bytes);
the head, JSON of [the object, the blobs' lengths, whether a file comes along, the lengths of the blobs in it]; the blobs. An open file is passed with the first bytes; the receiver
needs no permission to open it. Large blobs may come in such a file instead, in anonymous memory that the receiver maps: they are copied
once less, and the sender need not wait until they are read. Both ends are our own processes; nothing is unpickled.
"""

from __future__ import annotations

import array
import itertools
import json
import mmap
import os
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

_LENGTHS = struct.Struct(">IQ")
_SMALL_BYTES = 65_536
"""Parts up to this size are copied together, because one call costs more than the copy; so much is read ahead."""
_ALIGNMENT = 64
_FILE_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)


class Closed(Exception):
    """The other end has closed the channel."""


@dataclass(frozen=True)
class Frame:
    """`file`: descriptor of an open file; the receiver closes it. `mapped`: blobs that came in memory; their parts are not copied."""

    values: dict[str, Any]
    blobs: tuple[bytes, ...] = ()
    file: int | None = None
    mapped: tuple[memoryview, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A frame as bytes. `file`: descriptor of the open file that it passes; the sender keeps it open until it is sent."""

    parts: Sequence[bytes]
    file: int | None = None

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.parts))


def encode_frame(
    values: dict[str, Any],
    blobs: Sequence[bytes] = (),
    file: int | None = None,
    mapped: Sequence[int] | None = None,
) -> Encoded:
    """The frame, ready to be sent any number of times. `mapped`: lengths of the blobs in the file, if it holds some."""
    lengths = list(map(len, blobs))
    head = json.dumps([values, lengths, file is not None, mapped]).encode()
    return Encoded((_LENGTHS.pack(len(head), sum(lengths)), head, *blobs), file)


def send_frame(
    channel: socket.socket, values: dict[str, Any], blobs: Sequence[bytes] = (), file: int | None = None
) -> None:
    """Writes one frame.

    Raises:
        Closed: the other end has closed the channel.
    """
    send_frames(channel, [encode_frame(values, blobs, file)])


def send_mapped(
    channel: socket.socket, values: dict[str, Any], blobs: Sequence[bytes], large: Sequence[bytes]
) -> None:
    """As `send_frame`. The blobs `large` go in memory; if they are small after all, they follow the others.

    Raises:
        Closed: as `send_frame`.
    """
    if sum(map(len, large)) <= _SMALL_BYTES:
        send_frame(channel, values, [*blobs, *large])
        return
    with os.fdopen(os.memfd_create("blobs", os.MFD_CLOEXEC), "wb") as file:
        for blob in large:
            file.write(blob)
            file.write(bytes(-len(blob) % _ALIGNMENT))
        file.flush()
        send_frames(channel, [encode_frame(values, blobs, file.fileno(), list(map(len, large)))])


def send_frames(channel: socket.socket, frames: Iterable[Encoded]) -> None:
    """Writes several frames, small ones at once.

    Raises:
        Closed: the other end has closed the channel.
    """
    waiting: list[bytes] = []
    size, file = 0, None
    try:
        for frame in frames:
            if frame.file is not None or frame.size_bytes > _SMALL_BYTES:
                # A file arrives with the first byte that is sent along with it.
                _send(channel, waiting, file)
                waiting, size, file = [], 0, frame.file
            waiting += frame.parts
            size += frame.size_bytes
            if size > _SMALL_BYTES:
                _send(channel, waiting, file)
                waiting, size, file = [], 0, None
        _send(channel, waiting, file)
    except OSError as error:
        raise Closed(str(error)) from None


def receive_frame(channel: socket.socket) -> Frame:
    """Reads one frame, and nothing of the next.

    Raises:
        Closed: the other end has closed the channel, possibly in the middle of a frame.
    """
    return FrameReader(channel, ahead=0).read()


async def read_frame(stream: asyncio.StreamReader) -> Frame:
    """The next frame of a stream, for a parent with an event loop; frames that pass a file are not for it.

    Raises:
        Closed: as `receive_frame`.
    """
    try:
        head_bytes, _ = _LENGTHS.unpack(await stream.readexactly(_LENGTHS.size))
        values, lengths, *_ = json.loads(await stream.readexactly(head_bytes))
        blobs = [await stream.readexactly(length) for length in lengths]
    except (EOFError, OSError) as error:
        raise Closed(str(error)) from None
    return Frame(values, tuple(blobs))


class FrameReader:
    """Reads the frames of a channel, small ones several at once. `ahead`: so many bytes may it read of the frames that follow."""

    def __init__(self, channel: socket.socket, ahead: int = _SMALL_BYTES) -> None:
        self._channel = channel
        self._ahead = ahead
        self._kept = b""
        self._files: deque[int] = deque()

    @property
    def has_frame(self) -> bool:
        """Whether the next frame was read ahead, so that nothing more need arrive for it."""
        kept = len(self._kept)
        return kept >= _LENGTHS.size and kept >= _LENGTHS.size + sum(_LENGTHS.unpack_from(self._kept))

    def read(self) -> Frame:
        """The next frame.

        Raises:
            Closed: as `receive_frame`.
        """
        head_bytes, _ = _LENGTHS.unpack(self._take(_LENGTHS.size))
        values, lengths, has_file, mapped = json.loads(self._take(head_bytes))
        blobs = tuple(map(self._take, lengths))
        file = self._files.popleft() if has_file else None
        if mapped is not None and file is not None:
            return Frame(values, blobs, mapped=_map_blobs(file, mapped))
        return Frame(values, blobs, file)

    def _take(self, length: int) -> bytes:
        """The next bytes of the stream."""
        while len(self._kept) < length <= max(self._ahead, _LENGTHS.size):
            self._kept += self._receive(max(self._ahead, length - len(self._kept)))
        taken, self._kept = self._kept[:length], self._kept[length:]
        return taken if len(taken) == length else self._complete(taken, length)

    def _receive(self, most: int) -> bytes:
        """Bytes that have arrived, at least one, and the file that came along with any of them."""
        try:
            received, notes, _, _ = self._channel.recvmsg(most, _FILE_SPACE)
        except OSError as error:
            raise Closed(str(error)) from None
        if not received:
            raise Closed("end of stream")
        for level, kind, data in notes:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._files.extend(array.array("i", data))
        return received

    def _complete(self, begun: bytes, length: int) -> bytes:
        """So many bytes, of which the first have arrived; within a frame no file comes along."""
        buffer = bytearray(length)
        buffer[: len(begun)] = begun
        view = memoryview(buffer)[len(begun) :]
        while view:
            try:
                received = self._channel.recv_into(view)
            except OSError as error:
                raise Closed(str(error)) from None
            if not received:
                raise Closed("end of stream")
            view = view[received:]
        return bytes(buffer)


def _map_blobs(file: int, lengths: Sequence[int]) -> tuple[memoryview, ...]:
    """The blobs of these lengths in a file, which it closes; their memory is free once none of them is used."""
    try:
        content = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(file)
    padded = [length + -length % _ALIGNMENT for length in lengths]
    starts = itertools.accumulate(padded, initial=0)
    return tuple(content[start : start + length] for start, length in zip(starts, lengths, strict=False))


def _send(channel: socket.socket, parts: Sequence[bytes], file: int | None) -> None:
    if not parts:
        return
    is_small = sum(map(len, parts)) <= _SMALL_BYTES
    for at, content in enumerate([b"".join(parts)] if is_small else parts):
        sent = socket.send_fds(channel, [content], [file]) if file is not None and not at else 0
        if sent < len(content):
            channel.sendall(memoryview(content)[sent:])


def read_ahead(channel: socket.socket) -> queue.SimpleQueue[Frame]:
    """The frames that arrive, for a worker. When the channel closes, the process exits at once, even in the middle of a job."""
    waiting: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(FrameReader(channel), waiting), daemon=True).start()
    return waiting


def _read(reader: FrameReader, waiting: queue.SimpleQueue[Frame]) -> None:
    while True:
        try:
            waiting.put(reader.read())
        except Closed:
            os._exit(0)
