"""Resumable downloads from and uploads to the coordinator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from edge_client.files import file_sha256
from edge_client.transport.failures import ServerRefused, Unreachable
from edge_client.transport.link import Answer, Link, parse_answer
from edge_client.wire.device import BlobRef, UploadStart, UploadState

PIECE_BYTES = 32 * 1024 * 1024
"""Of a result in one request; read and sent in small blocks."""


def download(
    link: Link, blob: BlobRef, path: Path, *, check_cancelled: Callable[[], None] = lambda: None
) -> None:
    """Downloads a blob to `path` and checks its hash. Resumes a partial file, after restarts too.

    Raises:
        Unreachable: try again, the bytes received so far are kept; or the bytes have the wrong hash.
        ServerRefused: the coordinator has no such blob, or not for this device.
    """
    if path.exists():
        return
    partial = path.with_name(path.name + ".part")
    digest = None
    if not partial.exists() or partial.stat().st_size != blob.size_bytes:
        digest = _fetch(link, blob, partial, check_cancelled)
    if (
        partial.stat().st_size != blob.size_bytes
        or (digest or file_sha256(partial, check_cancelled)) != blob.sha256
    ):
        partial.unlink()
        raise Unreachable(
            f"the bytes received for blob {blob.sha256[:12]} have another hash; they are fetched again"
        )
    partial.replace(path)


def upload(
    link: Link,
    task: str,
    payload: Path,
    start: UploadStart,
    *,
    check_cancelled: Callable[[], None] = lambda: None,
) -> UploadState:
    """Sends a result from the coordinator's offset on. Returns the last answer.

    Raises:
        Unreachable: the connection was lost; the next call resumes.
        ServerRefused: 409 `round_closed`, 422 and its reason, and others.
    """
    state = _state(link.post(f"/tasks/{task}/upload", start))
    with payload.open("rb") as file:
        while not state.accepted:
            if not 0 <= state.offset < start.size_bytes:
                raise Unreachable(
                    f"the coordinator holds {state.offset} of {start.size_bytes} bytes and does not accept"
                )
            piece = Piece(
                file, state.offset, min(PIECE_BYTES, start.size_bytes - state.offset), check_cancelled
            )
            state = _send_piece(link, task, state.offset, piece)
    return state


def _send_piece(link: Link, task: str, offset: int, piece: Piece) -> UploadState:
    path = f"/tasks/{task}/upload?offset={offset}"
    try:
        after = _state(link.put(path, piece))
    except ServerRefused as refused:
        # A piece may have arrived and its acknowledgement been lost: the coordinator knows the offset.
        if refused.code != "upload_offset" or not isinstance(refused.details.get("offset"), int):
            raise
        after = UploadState(refused.details["offset"])
    if not after.accepted and after.offset <= offset:
        raise Unreachable(f"the upload makes no progress from byte {offset}")
    return after


def _state(answer: Answer) -> UploadState:
    return parse_answer(UploadState, answer)


def _fetch(link: Link, blob: BlobRef, partial: Path, check_cancelled: Callable[[], None]) -> str | None:
    """Fetches the missing bytes. Returns the SHA-256 of the file if all of it was fetched now, else None."""
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
            check_cancelled()
            size += len(chunk)
            if size > blob.size_bytes:
                break  # the hash cannot match; the caller finds out
            file.write(chunk)
            digest.update(chunk)
    return None if stream.first else digest.hexdigest()


class Piece:
    """Part of a file as a request body, read while it is sent. `check_cancelled` is called between blocks."""

    def __init__(
        self, file: BinaryIO, offset: int, size_bytes: int, check_cancelled: Callable[[], None]
    ) -> None:
        file.seek(offset)
        self.size_bytes = size_bytes
        self._file = file
        self._left = size_bytes
        self._check_cancelled = check_cancelled

    def read(self, size: int = -1) -> bytes:
        self._check_cancelled()
        block = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(block)
        return block
