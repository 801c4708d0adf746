"""Uploads: the result of a train task, or of a relay's task to fold, in resumable pieces, counted once.

    announce   size, hash, encoding; checked against the task's limit   POST /tasks/{task}/upload
    pieces     in order, straight into the task's part file             PUT  /tasks/{task}/upload?offset=N
    finish     with the last piece: hash, inflate, check (`device_api.results`), durable blob, one transaction; then `accepted`

An update that a code has written is stored as the tensors that it stands for, so folding does not know of codes.

Each upload holds two blocks in memory, and `limits.uploads_in_flight` bounds their number. No allocation depends on what a
device announces, and nothing of a refused result is kept. After a restart of either side an upload resumes at the size
of its part file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from starlette.requests import ClientDisconnect

from coordinator import failpoints
from coordinator.context.services import Services, ServicesDep
from coordinator.db import answers, rounds
from coordinator.db.answers import AcceptedUpdate
from coordinator.db.rounds import TaskRow
from coordinator.device_api import results
from coordinator.device_api.identity import CallerDep
from coordinator.device_api.tasks import own_task, require_open
from coordinator.errors import Refusal
from coordinator.limits.request_bodies import read_message
from coordinator.limits.uploads_in_flight import BLOCK_BYTES
from coordinator.model_references import is_sha256
from coordinator.rounds.intake import Rejection
from coordinator.scheduling import offers
from coordinator.storage.blobs import Transfer
from coordinator.storage.errors import is_disk_full
from edge_client.relay.inflation import BadEncoding
from edge_client.wire import arrays
from edge_client.wire.device import UploadStart, UploadState, to_json

STALL_SECONDS = 20.0
"""Silence within a piece after which its connection is closed, so that another one may resume."""

_checks = anyio.CapacityLimiter(2)
"""Results inflated or checked concurrently: each takes a core and some MB of memory; with a code, some models of it."""

router = APIRouter()


@router.post("/tasks/{task}/upload")
async def start_upload(
    task: str, request: Request, caller: CallerDep, services: ServicesDep
) -> Mapping[str, Any]:
    """Idempotent: answers the offset to resume at, and finishes a complete upload."""
    announced = await read_message(UploadStart, request)
    row = await _own_task(services, caller, task)
    if row.state != "accepted":
        _require_plausible(announced, row)
        transfer = services.part_files.of(row.id)
        async with transfer.lock:
            row = await _own_task(services, caller, task)  # the previous holder of the lock may have finished
            if row.state != "accepted":
                return to_json(await _Upload(services, row, announced, transfer).start())
    return to_json(await _repeat_answer(services, row, announced.sha256))


@router.put("/tasks/{task}/upload")
async def upload_piece(
    task: str,
    offset: Annotated[int, Query(ge=0, le=2**53)],
    request: Request,
    caller: CallerDep,
    services: ServicesDep,
) -> Mapping[str, Any]:
    """The body holds the bytes from `offset` on; the sender chooses how many."""
    with services.uploads_in_flight.acquire() as check_slot:
        row = await _own_task(services, caller, task)
        if row.state in ("waiting", "leased"):
            transfer = services.part_files.of(row.id)
            async with transfer.lock:
                # The previous holder of the lock may have finished.
                row = await _own_task(services, caller, task)
                if row.state != "accepted":
                    announced = await _announcement(services, row)
                    upload = _Upload(services, row, announced, transfer)
                    return to_json(await upload.append(request, offset, check_slot))
    if row.state != "accepted":
        require_open(row, services.clock())
    return to_json(await _repeat_answer(services, row, None))


class _Upload:
    """One upload, while its lock is held."""

    def __init__(self, services: Services, task: TaskRow, announced: UploadStart, transfer: Transfer) -> None:
        self._services = services
        self._task = task
        self._announced = announced
        self._transfer = transfer

    async def start(self) -> UploadState:
        """The offset to resume at. Bytes of a different earlier announcement are dropped."""
        before = await self._services.write(self._store_announcement)
        failpoints.reach("intake.opened")
        if before != self._announced:
            await run_in_threadpool(self._transfer.remove)
        return await self._progress()

    async def append(self, request: Request, offset: int, check_slot: Callable[[], None]) -> UploadState:
        """Receives a piece, and finishes the upload with the last one."""
        require_open(self._task, self._services.clock())
        at = self._transfer.size_bytes
        if offset != at:
            raise Refusal(409, "upload_offset", f"this piece begins at {offset}, resume at {at}", offset=at)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and offset + int(declared) > self._announced.size_bytes:
            raise self._oversized()
        await self._receive(request, offset, check_slot)
        await self._renew_lease()
        return await self._progress()

    async def _receive(self, request: Request, offset: int, check_slot: Callable[[], None]) -> None:
        """Streams the body into the part file, a block at a time. A disconnect keeps what was received."""
        try:
            await self._write_blocks(request, offset, check_slot)
        except FileNotFoundError as error:
            raise await self._missing_file(error) from None
        except OSError as error:
            await run_in_threadpool(self._transfer.truncate, offset)
            if not is_disk_full(error):
                raise
            raise _disk_full() from None
        except Refusal as refusal:
            if refusal.code == "oversized":
                await run_in_threadpool(self._transfer.truncate, offset)
            raise

    async def _write_blocks(self, request: Request, offset: int, check_slot: Callable[[], None]) -> None:
        writing: asyncio.Task[None] | None = None
        try:
            async for at, block in _blocks(request, offset, check_slot):
                if at + len(block) > self._announced.size_bytes:
                    raise self._oversized()
                if writing is not None:
                    await writing
                    failpoints.reach("intake.part_written")
                writing = asyncio.create_task(run_in_threadpool(self._transfer.write, at, block))
        finally:
            if writing is not None:
                await writing
                failpoints.reach("intake.part_written")

    async def _progress(self) -> UploadState:
        """The bytes received. A complete upload is checked and accepted first."""
        size = self._transfer.size_bytes
        if size < self._announced.size_bytes:
            return UploadState(size)
        await self._finish()
        return UploadState(size, accepted=True)

    async def _finish(self) -> None:
        """Accepts the complete result, or refuses it for good and drops it."""
        transfer = self._transfer
        try:
            file, digest = await anyio.to_thread.run_sync(self._decode, limiter=_checks)
            verdict = await anyio.to_thread.run_sync(
                partial(results.check, self._services, self._task, file, transfer.decoded), limiter=_checks
            )
            failpoints.reach("intake.checked")
            if isinstance(verdict, Rejection):
                raise await self._reject(verdict, file)
            if verdict is not None:
                file, digest = verdict
            await self._accept(file, digest)
        except FileNotFoundError as error:
            raise await self._missing_file(error) from None
        except (OSError, DBAPIError) as error:
            if not is_disk_full(error):
                raise
            raise _disk_full() from None
        except Refusal:
            await run_in_threadpool(transfer.remove)
            raise
        finally:
            transfer.decoded.unlink(missing_ok=True)
        await run_in_threadpool(transfer.remove)

    def _decode(self) -> tuple[Path, str]:
        announced, transfer = self._announced, self._transfer
        digest = transfer.sha256()
        if digest != announced.sha256:
            raise Refusal(
                422, "hash_mismatch", f"the upload has SHA-256 {digest}, announced was {announced.sha256}"
            )
        if announced.encoding == "identity":
            return transfer.path, digest
        try:
            return transfer.decoded, transfer.inflate(announced.decoded_bytes)
        except BadEncoding as error:
            raise Refusal(422, "bad_encoding", str(error)) from None

    async def _reject(self, verdict: Rejection, file: Path) -> Refusal:
        # Read first: once the rejection is recorded the task is over, and a sweep may remove the file.
        names_other_client = await run_in_threadpool(_names_other_client, file, self._task.device)

        def work(connection: Connection) -> None:
            task = own_task(connection, self._task.device, self._task.id)
            if task.state == "leased":
                answers.reject(connection, task, verdict.reason, verdict.message, self._services.clock())

        await self._services.write(work)
        self._notify()
        if names_other_client:
            return Refusal(403, "foreign_identity", verdict.message)
        return Refusal(413 if verdict.reason == "oversized" else 422, verdict.reason, verdict.message)

    async def _accept(self, file: Path, digest: str) -> None:
        """Stores the bytes durably, then counts them in one transaction if the round still accepts them."""
        accepted = AcceptedUpdate(
            blob=digest, sent_sha256=self._announced.sha256, payload_bytes=self._announced.size_bytes
        )

        def work(connection: Connection) -> None:
            task = own_task(connection, self._task.device, self._task.id)
            now = self._services.clock()
            require_open(task, now)
            results.accept(connection, task, accepted, now)

        blobs = self._services.blobs
        try:
            with blobs.held(digest):
                await run_in_threadpool(blobs.adopt, file, digest)
                failpoints.reach("intake.blob_stored")
                await self._services.write(work)
        except Refusal:
            await run_in_threadpool(self._drop, digest)
            raise
        failpoints.reach("intake.committed")
        self._notify()

    async def _missing_file(self, error: FileNotFoundError) -> Exception:
        """Why the part file is gone: its task ended, for the reason in its row, or a folder is missing."""
        services, device, task = self._services, self._task.device, self._task.id
        row = await run_in_threadpool(services.database.read, lambda at: own_task(at, device, task))
        try:
            require_open(row, services.clock())
        except Refusal as reason:
            return reason
        if self._transfer.path.exists() or not services.settings.home.is_dir():
            return error
        return Refusal(409, "upload_offset", "the bytes of this upload were lost, start it again", offset=0)

    def _drop(self, digest: str) -> None:
        """Removes the blob of a late result, unless it counts."""
        services = self._services
        with services.blobs.reference_lock:
            if not services.database.read(lambda at: results.is_kept(at, digest)):
                services.blobs.remove([digest])

    def _store_announcement(self, connection: Connection) -> UploadStart | None:
        """Stores the announcement and returns the previous one."""
        task = own_task(connection, self._task.device, self._task.id)
        now = self._services.clock()
        require_open(task, now)
        before = answers.find_upload(connection, task.id)
        if before != self._announced:
            answers.start_upload(connection, task.id, self._announced, now)
        rounds.lease(connection, task.id, now + self._lease)
        return before

    async def _renew_lease(self) -> None:
        """Renews the lease, since sending is a sign of life; once in a while, not for every piece."""
        now = self._services.clock()
        if self._task.leased_until is None or self._task.leased_until - now < self._lease / 2:
            await self._services.write(lambda at: rounds.lease(at, self._task.id, now + self._lease))

    @property
    def _lease(self) -> timedelta:
        return timedelta(seconds=self._services.settings.lease_seconds)

    def _oversized(self) -> Refusal:
        return Refusal(
            413, "oversized", f"more than the announced {self._announced.size_bytes} bytes arrived"
        )

    def _notify(self) -> None:
        self._services.signals.notify(f"run:{self._task.run}", "events")


async def _own_task(services: Services, caller: str, task: str) -> TaskRow:
    return await run_in_threadpool(services.database.read, lambda at: _uploading_task(at, caller, task))


def _uploading_task(connection: Connection, caller: str, task: str) -> TaskRow:
    """The caller's task, which an upload to the coordinator answers.

    Raises:
        Refusal: as `own_task`; 409 `wrong_kind`: no upload does, or the device's relay takes it.
    """
    row = own_task(connection, caller, task)
    if row.kind not in ("train", "fold"):
        raise Refusal(409, "wrong_kind", f"this task is to {row.kind}, which no upload answers")
    if row.offer.get(offers.RELAY) is not None:
        raise Refusal(
            409, "wrong_kind", "updates of this run go to the device's relay, not to the coordinator"
        )
    return row


async def _announcement(services: Services, task: TaskRow) -> UploadStart:
    announced = await run_in_threadpool(services.database.read, lambda at: answers.find_upload(at, task.id))
    if announced is None:
        raise Refusal(409, "upload_offset", "this upload was not announced", offset=0)
    return announced


async def _repeat_answer(services: Services, task: TaskRow, digest: str | None) -> UploadState:
    """The answer of when this result was accepted.

    Raises:
        Refusal: 409 `not_leased`: the result was lost since; 409 `duplicate`: `digest` is that of another result.
    """
    update = await run_in_threadpool(services.database.read, lambda at: results.accepted_before(at, task))
    if update is None:
        raise Refusal(
            409, "not_leased", f"the result of round {task.round} was lost; check in to get the task again"
        )
    if digest is not None and digest != update.sent_sha256:
        raise Refusal(409, "duplicate", f"another result of round {task.round} was already accepted")
    return UploadState(update.payload_bytes, accepted=True)


def _require_plausible(announced: UploadStart, task: TaskRow) -> None:
    """Checks the announced sizes and hash before anything is written or allocated."""
    limit = task.offer["result_limit_bytes"]
    largest = max(announced.size_bytes, announced.decoded_bytes)
    if largest > limit:
        raise Refusal(413, "oversized", f"{largest} bytes, at most {limit} are allowed")
    if min(announced.size_bytes, announced.decoded_bytes) < 1:
        raise Refusal(422, "malformed", "UploadStart: a size is not positive")
    if announced.encoding == "identity" and announced.size_bytes != announced.decoded_bytes:
        raise Refusal(422, "malformed", "UploadStart: without an encoding both sizes must be equal")
    if not is_sha256(announced.sha256):
        raise Refusal(422, "malformed", "UploadStart.sha256 is not a SHA-256 in lower-case hex")


async def _blocks(
    request: Request, offset: int, check_slot: Callable[[], None]
) -> AsyncIterator[tuple[int, bytearray]]:
    """The body in blocks, each with its offset; after an interruption, the bytes before it first."""
    block, at = bytearray(), offset
    interruption: Exception | None = None
    stream = request.stream()
    while True:
        try:
            check_slot()
            async with asyncio.timeout(STALL_SECONDS):
                block += await anext(stream)
        except StopAsyncIteration:
            break
        except TimeoutError:
            interruption = Refusal(
                408, "upload_stalled", f"nothing arrived for {STALL_SECONDS:.0f} s; resume where it stopped"
            )
            break
        except (ClientDisconnect, Refusal) as error:
            interruption = error
            break
        if len(block) >= BLOCK_BYTES:
            yield at, block
            at += len(block)
            block = bytearray()
    if block:
        yield at, block
    if interruption is not None:
        raise interruption


def _names_other_client(file: Path, device: str) -> bool:
    try:
        client = arrays.read_header(arrays.FilePayload(file)).values.get("client")
    except arrays.Malformed:
        return False
    return isinstance(client, str) and client != device


def _disk_full() -> Refusal:
    message = "the coordinator's disk is full; nothing of this piece was kept, try again later"
    return Refusal(507, "disk_full", message)
