"""Frames between a parent and its worker process, over a socket pair.

A frame is a JSON object and any number of byte strings. Layout: 4 bytes big-endian length of the JSON, the JSON (its key
`blobs` lists lengths), then the blobs. An open file is passed with the first bytes; the receiver needs no permission to open
it. Both ends are our own processes; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_LENGTH_BYTES = 4
_SMALL_BYTES = 65_536
"""Parts up to this size are copied together, because one call costs more than the copy."""


class Closed(Exception):
    """The other end has closed the channel."""


@dataclass(frozen=True)
class Frame:
    """`file`: descriptor of an open file; the receiver closes it."""

    values: dict[str, Any]
    blobs: tuple[bytes, ...] = ()
    file: int | None = None


@dataclass(frozen=True)
class Encoded:
    """A frame as bytes. `file`: descriptor of the open file that it passes; the sender keeps it open until it is sent."""

    parts: Sequence[bytes]
    file: int | None = None

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.parts))


def encode_frame(values: dict[str, Any], blobs: Sequence[bytes] = (), file: int | None = None) -> Encoded:
    """The frame, ready to be sent any number of times."""
    head = json.dumps({**values, "blobs": [len(blob) for blob in blobs]}).encode()
    return Encoded((len(head).to_bytes(_LENGTH_BYTES, "big"), head, *blobs), file)


def send_frame(
    channel: socket.socket, values: dict[str, Any], blobs: Sequence[bytes] = (), file: int | None = None
) -> None:
    """Writes one frame.

    Raises:
        Closed: the other end has closed the channel.
    """
    send_frames(channel, [encode_frame(values, blobs, file)])


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
    """Reads one frame.

    Raises:
        Closed: the other end has closed the channel, possibly in the middle of a frame.
    """
    first, file = _receive_first(channel)
    head = json.loads(_receive_exactly(channel, int.from_bytes(first, "big")))
    lengths = head.pop("blobs")
    return Frame(head, tuple(_receive_exactly(channel, length) for length in lengths), file)


def _send(channel: socket.socket, parts: Sequence[bytes], file: int | None) -> None:
    if not parts:
        return
    is_small = sum(map(len, parts)) <= _SMALL_BYTES
    for at, content in enumerate([b"".join(parts)] if is_small else parts):
        sent = socket.send_fds(channel, [content], [file]) if file is not None and not at else 0
        if sent < len(content):
            channel.sendall(memoryview(content)[sent:])


def _receive_first(channel: socket.socket) -> tuple[bytes, int | None]:
    try:
        received, files, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, 1)
    except OSError as error:
        raise Closed(str(error)) from None
    if not received:
        raise Closed("end of stream")
    return received + _receive_exactly(channel, _LENGTH_BYTES - len(received)), files[0] if files else None


def _receive_exactly(channel: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        try:
            received = channel.recv_into(view)
        except OSError as error:
            raise Closed(str(error)) from None
        if not received:
            raise Closed("end of stream")
        view = view[received:]
    return bytes(buffer)


def read_ahead(channel: socket.socket) -> queue.Queue[Frame]:
    """The frames that arrive, for a worker. When the channel closes, the process exits at once, even in the middle of a job."""
    waiting: queue.Queue[Frame] = queue.Queue()
    threading.Thread(target=_read, args=(channel, waiting), daemon=True).start()
    return waiting


def _read(channel: socket.socket, waiting: queue.Queue[Frame]) -> None:
    while True:
        try:
            waiting.put(receive_frame(channel))
        except Closed:
            os._exit(0)
