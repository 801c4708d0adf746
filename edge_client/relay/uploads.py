"""Uploads that a relay takes in the coordinator's place, resumable like those.

    announce ─► pieces ─► complete: hash, inflate, check, durable ─► the coordinator counts it ─► the device hears `accepted`

So what a device hears is what counts, and a device whose answer is lost may ask again. Refusals have the codes of the coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

from edge_client.files import NO_ROOM
from edge_client.relay.inflation import BadEncoding
from edge_client.relay.intake import Rejection
from edge_client.relay.intermediary import Intermediary
from edge_client.relay.updates import HashMismatch, KeptUpdate, KeptUpdates
from edge_client.transport.failures import ServerRefused
from edge_client.wire.device import UploadStart, UploadState
from edge_client.wire.relays import Figures, Refused, RelayedTask

_BLOCK_BYTES = 2**18
_REMEMBERED = 10_000


class Uploads:
    """`limit_bytes`: most disk for updates. `note`: logs what was kept."""

    def __init__(
        self,
        intermediary: Intermediary,
        kept: KeptUpdates,
        limit_bytes: int,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._intermediary = intermediary
        self._kept = kept
        self._limit_bytes = limit_bytes
        self._note = note
        self._lock = threading.Lock()
        self._tasks: dict[str, RelayedTask] = {}

    def is_kept(self, device: str, task: str) -> bool:
        """Whether the relay keeps this update, not the coordinator. Raises: ServerRefused, Unreachable."""
        return self._task(device, task).kept

    def start(self, device: str, task: str, start: UploadStart) -> UploadState:
        """Begins an upload or says where to resume; finishes a complete one. Raises: ServerRefused, Unreachable."""
        asked = self._task(device, task)
        with self._kept.locked(task) as files:
            files = _require_free(files)
            if (figures := files.figures) is not None:
                if figures.sent_sha256 != start.sha256:
                    raise ServerRefused(409, "duplicate", "another result of this task was already kept")
                return self._count(files, device, task, figures)
            self._require_plausible(asked, start)
            files.begin(asked, start)
            return self._progress(files, device, task, start)

    def append(self, device: str, task: str, offset: int, body: BinaryIO, size: int) -> UploadState:
        """Receives the bytes from `offset` on, and finishes the upload with the last ones. Raises: ServerRefused, Unreachable."""
        self._task(device, task)
        with self._kept.locked(task) as files:
            files = _require_free(files)
            if (figures := files.figures) is not None:
                return self._count(files, device, task, figures)
            start = files.start
            at = files.offset if start is not None else 0
            if start is None or offset != at:
                message = f"this piece begins at {offset}, resume at {at}"
                raise ServerRefused(409, "upload_offset", message, {"offset": at})
            if offset + size > start.size_bytes:
                raise ServerRefused(413, "oversized", f"more than the announced {start.size_bytes} bytes")
            try:
                files.append(_blocks(body, size))
            except OSError as error:
                raise _no_room(error) from None
            return self._progress(files, device, task, start)

    def _progress(self, files: KeptUpdate, device: str, task: str, start: UploadStart) -> UploadState:
        if files.offset < start.size_bytes:
            return UploadState(files.offset)
        try:
            verdict = files.finish()
        except HashMismatch as error:
            files.drop()
            raise ServerRefused(422, "hash_mismatch", str(error)) from None
        except BadEncoding as error:
            files.drop()
            raise ServerRefused(422, "bad_encoding", str(error)) from None
        except OSError as error:
            files.drop()
            raise _no_room(error) from None
        if isinstance(verdict, Rejection):
            self._intermediary.rejected(task, device, Refused(verdict.reason, verdict.message))
            files.drop()
            status = 413 if verdict.reason == "oversized" else 422
            raise ServerRefused(status, verdict.reason, verdict.message)
        return self._count(files, device, task, verdict)

    def _count(self, files: KeptUpdate, device: str, task: str, figures: Figures) -> UploadState:
        try:
            self._intermediary.accepted(task, device, figures)
        except ServerRefused as refused:
            if not refused.is_transient and refused.status != 401:
                files.drop()
            raise
        self._note(f"keeps the update of device {device}: task {task}, {figures.num_examples} examples")
        return UploadState(figures.sent_bytes, accepted=True)

    def _task(self, device: str, task: str) -> RelayedTask:
        """What the device's task asks for. Asked of the coordinator once, which checks that it is the device's."""
        with self._lock:
            known = self._tasks.get(task)
        if known is None:
            known = self._kept.of(task).task or self._intermediary.task(task, device)
            with self._lock:
                if len(self._tasks) >= _REMEMBERED:
                    self._tasks.clear()
                self._tasks[task] = known
        if known.offer.message.get("client") != device:
            raise ServerRefused(403, "not_yours", "this task belongs to another device")
        return known

    def _require_plausible(self, task: RelayedTask, start: UploadStart) -> None:
        limit = task.expected["payload_limit_bytes"]
        largest = max(start.size_bytes, start.decoded_bytes)
        if largest > limit:
            raise ServerRefused(413, "oversized", f"{largest} bytes, at most {limit} are allowed")
        if min(start.size_bytes, start.decoded_bytes) < 1 or (
            start.encoding == "identity" and start.size_bytes != start.decoded_bytes
        ):
            raise ServerRefused(422, "malformed", "UploadStart: a size is wrong")
        if self._kept.size_bytes() + 2 * largest > self._limit_bytes:
            raise ServerRefused(
                507,
                "disk_full",
                "the relay keeps as many updates as its outbox_bytes allows; try again later",
            )


def _require_free(files: KeptUpdate | None) -> KeptUpdate:
    if files is None:
        raise ServerRefused(503, "busy", "another request for this task is in progress", retry_after=1.0)
    return files


def _blocks(body: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0:
        block = body.read(min(size, _BLOCK_BYTES))
        if not block:
            return  # the device hung up: what has come stays
        size -= len(block)
        yield block


def _no_room(error: OSError) -> Exception:
    if error.errno not in NO_ROOM:
        return error
    return ServerRefused(507, "disk_full", "the relay's disk is full; try again later")
