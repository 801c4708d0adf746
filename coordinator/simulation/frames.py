"""Frames between the simulation and its workers: a JSON object and any number of byte strings.

Layout: 4 bytes big-endian length of the JSON, the JSON (its key `blobs` lists lengths), then the blobs.
Both ends are our own processes; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Closed(Exception):
    """The other end is gone."""


@dataclass(frozen=True)
class Frame:
    values: dict[str, Any]
    blobs: tuple[bytes, ...] = ()


def send(channel: socket.socket, values: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Writes one frame.

    Raises:
        Closed: the other end is gone.
    """
    head = json.dumps({**values, "blobs": [len(blob) for blob in blobs]}).encode()
    try:
        channel.sendall(len(head).to_bytes(4, "big") + head)
        for blob in blobs:
            channel.sendall(blob)
    except OSError as error:
        raise Closed(str(error)) from None


def receive(channel: socket.socket) -> Frame:
    """Reads one frame.

    Raises:
        Closed: the other end is gone, also in the middle of a frame.
    """
    head = json.loads(_exactly(channel, int.from_bytes(_exactly(channel, 4), "big")))
    lengths = head.pop("blobs")
    return Frame(head, tuple(_exactly(channel, length) for length in lengths))


def _exactly(channel: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        try:
            got = channel.recv_into(view)
        except OSError as error:
            raise Closed(str(error)) from None
        if not got:
            raise Closed("end of stream")
        view = view[got:]
    return bytes(buffer)
