"""Files to and from the coordinator, gone on from where a cut line left them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from edge_client.failures import ServerRefused, Unreachable
from edge_client.files import file_sha256
from edge_client.link import Answer, Link, understood
from edge_client.wire.device import BlobRef, UploadStart, UploadState

PIECE_BYTES = 32 * 1024 * 1024
"""Of a result, in one request; read and sent in small blocks."""


def download(link: Link, blob: BlobRef, path: Path, *, going: Callable[[], None] = lambda: None) -> None:
    """Puts a blob at `path`, its hash checked. A partial file beside it is gone on from, over restarts too.

    Raises:
        Unreachable: try again, what came so far is kept; or the bytes were not those asked for.
        ServerRefused: it has no such blob, or not for this device.
    """
    if path.exists():
        return
    partial = path.with_name(path.name + ".part")
    came = None
    if not partial.exists() or partial.stat().st_size != blob.size_bytes:
        came = _fetch(link, blob, partial, going)
    if partial.stat().st_size != blob.size_bytes or (came or file_sha256(partial, going)) != blob.sha256:
        partial.unlink()
        raise Unreachable(f"what came for blob {blob.sha256[:12]} is not what its hash says; fetched anew")
    partial.replace(path)


def upload(
    link: Link, task: str, payload: Path, start: UploadStart, *, going: Callable[[], None] = lambda: None
) -> UploadState:
    """Sends a result, from where the coordinator has it; the last answer.

    Raises:
        Unreachable: cut off; the next call goes on from there.
        ServerRefused: 409 `round_closed`, 422 and its reason, and others.
    """
    state = _state(link.post(f"/tasks/{task}/upload", start))
    with payload.open("rb") as file:
        while not state.accepted:
            if not 0 <= state.offset < start.size_bytes:
                raise Unreachable(
                    f"the coordinator holds {state.offset} of {start.size_bytes} bytes, accepts not"
                )
            piece = Piece(file, state.offset, min(PIECE_BYTES, start.size_bytes - state.offset), going)
            state = _piece(link, task, state.offset, piece)
    return state


def _piece(link: Link, task: str, offset: int, piece: Piece) -> UploadState:
    path = f"/tasks/{task}/upload?offset={offset}"
    try:
        after = _state(link.put(path, piece))
    except ServerRefused as refused:
        # A piece may have arrived whose acknowledgement was lost; then it knows better where we are.
        if refused.code != "upload_offset" or not isinstance(refused.details.get("offset"), int):
            raise
        after = UploadState(refused.details["offset"])
    if not after.accepted and after.offset <= offset:
        raise Unreachable(f"the upload does not move on from byte {offset}")
    return after


def _state(answer: Answer) -> UploadState:
    return understood(UploadState, answer)


def _fetch(link: Link, blob: BlobRef, partial: Path, going: Callable[[], None]) -> str | None:
    """Adds what is missing. The SHA-256 of the file where all of it came now, else None."""
    have = partial.stat().st_size if partial.exists() else 0
    if have > blob.size_bytes:
        partial.unlink()
        have = 0
    digest = hashlib.sha256()
    with (
        link.stream(f"/blobs/{blob.sha256}", have) as stream,
        partial.open("ab" if stream.first else "wb") as file,
    ):
        size = file.tell()
        for chunk in stream.chunks:
            going()
            size += len(chunk)
            if size > blob.size_bytes:
                break  # no hash can fit any more; the caller finds out
            file.write(chunk)
            digest.update(chunk)
    return None if stream.first else digest.hexdigest()


class Piece:
    """A part of a file as the body of a request: read while it is sent. `going` is called between blocks."""

    def __init__(self, file: BinaryIO, offset: int, size_bytes: int, going: Callable[[], None]) -> None:
        file.seek(offset)
        self.size_bytes = size_bytes
        self._file = file
        self._left = size_bytes
        self._going = going

    def read(self, size: int = -1) -> bytes:
        self._going()
        block = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(block)
        return block
