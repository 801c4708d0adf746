"""Bytes of replies in shared memory, which costs a sixth of a socket: one copy in, one copy out.

A worker has at most two messages at a time, so its replies alternate between two files in memory: when it writes to one again, the
reply that was there has been read. The files have no name, so nothing can be left behind. Small and very large replies take the
socket.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

from edge_client.processes.channel import Frame, send_frame

MIN_BYTES, _MAX_BYTES = 32 * 1024, 32 * 1024 * 1024
_FILES = 2


class Outbox:
    """The worker's side."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._files: list[mmap.mmap | None] = [None] * _FILES
        self._next = 0

    def send(self, values: dict[str, Any], blobs: Sequence[bytes]) -> None:
        """Sends a reply. Raises: Closed: the other end has closed the channel."""
        size = sum(map(len, blobs))
        if not MIN_BYTES <= size <= _MAX_BYTES:
            self._next = (self._next + 1) % _FILES
            send_frame(self._channel, values, blobs)
            return
        place, self._next = self._next, (self._next + 1) % _FILES
        file, handle = self._files[place], None
        if file is None or len(file) < size:
            handle = os.memfd_create("reply")
            os.truncate(handle, size)
            self._files[place] = file = mmap.mmap(handle, size)
        position = 0
        for blob in blobs:
            file[position : (position := position + len(blob))] = blob
        send_frame(self._channel, {**values, "outbox": [place, *map(len, blobs)]}, file=handle)
        if handle is not None:
            os.close(handle)


class Inbox:
    """The reading side, of one worker."""

    def __init__(self) -> None:
        self._files: list[mmap.mmap | None] = [None] * _FILES

    def open(self, frame: Frame) -> Frame:
        """The frame with the blobs that its sender put into shared memory."""
        if (outbox := frame.values.pop("outbox", None)) is None:
            return frame
        place, *lengths = outbox
        if frame.file is not None:
            self._files[place] = mmap.mmap(frame.file, 0, prot=mmap.PROT_READ)
            os.close(frame.file)
        file = self._files[place]
        assert file is not None
        ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
        return Frame(
            frame.values,
            tuple(file[end - length : end] for end, length in zip(ends, lengths, strict=True)),
        )
