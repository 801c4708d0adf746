"""Uploads: the result of a train task, in pieces that can be taken up again, counted once.

    announce   size, hash, encoding; held against the task's limit      POST /tasks/{task}/upload
    pieces     in order, straight into the task's part file             PUT  /tasks/{task}/upload?offset=N
    finish     with the last piece: hash, inflate, `intake.check`, durable blob, one transaction; then `accepted`

Nothing is held in memory but a block, nothing is allocated by what a device says, and of a result that is
refused nothing is kept. A restart of either side goes on at the size of the part file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from starlette.requests import ClientDisconnect

from coordinator import failpoints
from coordinator.api.deps import Serving
from coordinator.db import answers, rounds
from coordinator.db.answers import Taken
from coordinator.db.rounds import TaskRow
from coordinator.db.store import is_disk_full
from coordinator.device_api.bodies import message_of
from coordinator.device_api.identity import Caller, Calling
from coordinator.device_api.tasks import own_task, require_wanted
from coordinator.errors import Refusal
from coordinator.part_files import BadEncoding, Transfer
from coordinator.rounds import intake
from coordinator.rounds.intake import Rejection
from coordinator.rounds.plan import Task
from coordinator.services import Services
from edge_client.wire import arrays
from edge_client.wire.device import UploadStart, UploadState, to_json
from edge_client.wire.messages import TaskMessage

BLOCK_BYTES = 2**20
STALL_SECONDS = 20.0
"""Silence within a piece after which its connection is given up, so that another one may go on."""

_checks = anyio.CapacityLimiter(2)
"""Results checked at a time: each takes a core."""

T = TypeVar("T")
router = APIRouter()


@router.post("/tasks/{task}/upload")
async def start_upload(
    task: str,
    request: Request,
    caller: Calling,
    services: Serving,
) -> Mapping[str, Any]:
    """Safe to repeat: answers how far the upload came, and finishes one that is all there."""
    said = await message_of(UploadStart, request)
    asked = await _own(services, caller, task)
    if asked.state != "accepted":
        _require_fit(said, asked)
        transfer = services.part_files.of(asked.id)
        async with transfer.turn:
            asked = await _own(services, caller, task)  # whoever had the turn before may have finished
            if asked.state != "accepted":
                return to_json(await _Upload(services, asked, said, transfer).announced())
    return to_json(await _as_before(services, asked, said.sha256))


@router.put("/tasks/{task}/upload")
async def upload_piece(
    task: str,
    offset: Annotated[int, Query(ge=0, le=2**53)],
    request: Request,
    caller: Calling,
    services: Serving,
) -> Mapping[str, Any]:
    """The body are the bytes from `offset` on, as many as fit the sender."""
    asked = await _own(services, caller, task)
    if asked.state in ("waiting", "leased"):
        transfer = services.part_files.of(asked.id)
        async with transfer.turn:
            asked = await _own(services, caller, task)  # whoever had the turn before may have finished
            if asked.state != "accepted":
                said = await _announcement(services, asked)
                return to_json(await _Upload(services, asked, said, transfer).piece(request, offset))
    if asked.state != "accepted":
        require_wanted(asked, services.clock())
    return to_json(await _as_before(services, asked, None))


class _Upload:
    """One upload while its turn is held."""

    def __init__(self, services: Services, task: TaskRow, said: UploadStart, transfer: Transfer) -> None:
        self._services = services
        self._task = task
        self._said = said
        self._transfer = transfer

    async def announced(self) -> UploadState:
        """Where to go on. What came of something else than is announced now is dropped."""
        before = await self._write(self._keep_announcement)
        failpoints.reach("intake.opened")
        if before != self._said:
            await run_in_threadpool(self._transfer.remove)
        return await self._state()

    async def piece(self, request: Request, offset: int) -> UploadState:
        """Takes in a piece, and finishes with the last."""
        require_wanted(self._task, self._services.clock())
        at = self._transfer.size_bytes
        if offset != at:
            raise Refusal(409, "upload_offset", f"this piece begins at {offset}, go on from {at}", offset=at)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and offset + int(declared) > self._said.size_bytes:
            raise self._oversized()
        await self._append(request, offset)
        await self._renew_lease()
        return await self._state()

    async def _append(self, request: Request, offset: int) -> None:
        """Streams the body into the part file, a block at a time. What came before a cut stays."""
        try:
            await self._write_blocks(request, offset)
        except FileNotFoundError:
            raise await self._swept() from None
        except OSError as error:
            await run_in_threadpool(self._transfer.cut_back, offset)
            if not is_disk_full(error):
                raise
            raise _disk_full() from None
        except Refusal as refusal:
            if refusal.code == "oversized":
                await run_in_threadpool(self._transfer.cut_back, offset)
            raise

    async def _write_blocks(self, request: Request, offset: int) -> None:
        """While a block is hashed and written, the next one is received and deciphered."""
        writing: asyncio.Task[None] | None = None
        try:
            async for at, block in _blocks(request, offset):
                if at + len(block) > self._said.size_bytes:
                    raise self._oversized()
                if writing is not None:
                    await writing
                    failpoints.reach("intake.part_written")
                writing = asyncio.create_task(run_in_threadpool(self._transfer.write, at, block))
        finally:
            if writing is not None:
                await writing
                failpoints.reach("intake.part_written")

    async def _state(self) -> UploadState:
        size = self._transfer.size_bytes
        if size < self._said.size_bytes:
            return UploadState(size)
        await self._finish()
        return UploadState(size, accepted=True)

    async def _finish(self) -> None:
        """All bytes are there: the result is accepted, or refused for good and forgotten."""
        transfer = self._transfer
        try:
            file, digest = await run_in_threadpool(self._whole_result)
            verdict = await anyio.to_thread.run_sync(self._checked, file, limiter=_checks)
            failpoints.reach("intake.checked")
            if isinstance(verdict, Rejection):
                raise await self._rejected(verdict, file)
            await self._accept(file, digest)
        except FileNotFoundError:
            raise await self._swept() from None
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

    def _whole_result(self) -> tuple[Path, str]:
        """The file of the decoded result and its SHA-256."""
        said, transfer = self._said, self._transfer
        digest = transfer.sha256()
        if digest != said.sha256:
            raise Refusal(
                422, "hash_mismatch", f"SHA-256 of what came is {digest}, announced was {said.sha256}"
            )
        if said.encoding == "identity":
            return transfer.path, digest
        try:
            return transfer.decoded, transfer.inflate(said.decoded_bytes)
        except BadEncoding as error:
            raise Refusal(422, "bad_encoding", str(error)) from None

    def _checked(self, file: Path) -> object:
        """Update or rejection."""
        task = self._task
        opened = self._services.database.read(lambda at: rounds.find_round(at, task.run, task.round))
        assert opened is not None  # train tasks are written together with their round
        asked = Task(task.position, TaskMessage.from_json(task.offer["message"]))
        return intake.check(arrays.FilePayload(file), asked, opened.expected)

    async def _rejected(self, verdict: Rejection, file: Path) -> Refusal:
        """Writes the rejection down, and gives the answer that tells it."""
        # Read first: once the rejection is written the task is over, and a sweep may remove the file.
        names_another = await run_in_threadpool(_names_another, file, self._task.device)

        def work(connection: Connection) -> None:
            task = own_task(connection, self._task.device, self._task.id)
            if task.state == "leased":
                answers.reject(connection, task, verdict.reason, verdict.words, self._services.clock())

        await self._write(work)
        self._notify()
        if names_another:
            return Refusal(403, "foreign_identity", verdict.words)
        return Refusal(413 if verdict.reason == "oversized" else 422, verdict.reason, verdict.words)

    async def _accept(self, file: Path, digest: str) -> None:
        """Durable bytes first, then one transaction that makes them count, if the round still takes them."""
        taken = Taken(blob=digest, sent_sha256=self._said.sha256, payload_bytes=self._said.size_bytes)

        def work(connection: Connection) -> None:
            task = own_task(connection, self._task.device, self._task.id)
            now = self._services.clock()
            require_wanted(task, now)
            answers.accept(connection, task, taken, now)

        blobs = self._services.blobs
        try:
            with blobs.held(digest):
                await run_in_threadpool(blobs.adopt, file, digest)
                failpoints.reach("intake.blob_stored")
                await self._write(work)
        except Refusal:
            await run_in_threadpool(self._drop, digest)
            raise
        failpoints.reach("intake.committed")
        self._notify()

    async def _swept(self) -> Refusal:
        """Why the part file is gone: its task ended, for the reason that its row gives."""
        services, device, task = self._services, self._task.device, self._task.id
        found = await run_in_threadpool(services.database.read, lambda at: own_task(at, device, task))
        try:
            require_wanted(found, services.clock())
        except Refusal as reason:
            return reason
        return Refusal(409, "upload_offset", "what came of this upload is lost, begin it again", offset=0)

    def _drop(self, digest: str) -> None:
        """Removes the blob of a result that came too late, unless it counts."""
        services = self._services
        with services.blobs.naming:
            if not services.database.read(lambda at: answers.is_counted(at, digest)):
                services.blobs.remove([digest])

    def _keep_announcement(self, connection: Connection) -> UploadStart | None:
        """Writes down what is announced, and gives what was announced before."""
        task = own_task(connection, self._task.device, self._task.id, "train")
        now = self._services.clock()
        require_wanted(task, now)
        before = answers.find_upload(connection, task.id)
        if before != self._said:
            answers.start_upload(connection, task.id, self._said, now)
        rounds.lease(connection, task.id, now + self._lease)
        return before

    async def _renew_lease(self) -> None:
        """Sending is a sign of life too. Written once in a while, not for every piece."""
        now = self._services.clock()
        if self._task.leased_until is None or self._task.leased_until - now < self._lease / 2:
            await self._write(lambda at: rounds.lease(at, self._task.id, now + self._lease))

    @property
    def _lease(self) -> timedelta:
        return timedelta(seconds=self._services.settings.lease_seconds)

    def _oversized(self) -> Refusal:
        return Refusal(413, "oversized", f"more came than the announced {self._said.size_bytes} bytes")

    async def _write(self, work: Callable[[Connection], T]) -> T:
        return await asyncio.wrap_future(self._services.database.write(work))

    def _notify(self) -> None:
        self._services.signals.notify(f"run:{self._task.run}", "events")


async def _own(services: Services, caller: Caller, task: str) -> TaskRow:
    return await run_in_threadpool(services.database.read, lambda at: own_task(at, caller.id, task, "train"))


async def _announcement(services: Services, task: TaskRow) -> UploadStart:
    said = await run_in_threadpool(services.database.read, lambda at: answers.find_upload(at, task.id))
    if said is None:
        raise Refusal(409, "upload_offset", "this upload was not announced", offset=0)
    return said


async def _as_before(services: Services, task: TaskRow, digest: str | None) -> UploadState:
    """What was answered when this result was accepted.

    Raises:
        Refusal: 409 `duplicate`: `digest` is that of another result.
    """
    counted = await run_in_threadpool(services.database.read, lambda at: answers.counted(at, task))
    if counted is None:
        raise Refusal(
            409, "not_leased", f"the result of round {task.round} was lost; check in to be asked again"
        )
    if digest is not None and digest != counted.sent_sha256:
        raise Refusal(409, "duplicate", f"another result of round {task.round} counts already")
    return UploadState(counted.payload_bytes, accepted=True)


def _require_fit(said: UploadStart, task: TaskRow) -> None:
    """Sizes and hash that can be, before anything is written or allocated."""
    limit = task.offer["result_limit_bytes"]
    largest = max(said.size_bytes, said.decoded_bytes)
    if largest > limit:
        raise Refusal(413, "oversized", f"{largest} bytes, at most {limit} are allowed")
    if min(said.size_bytes, said.decoded_bytes) < 1:
        raise Refusal(422, "malformed", "UploadStart: a size is not positive")
    if said.encoding == "identity" and said.size_bytes != said.decoded_bytes:
        raise Refusal(422, "malformed", "UploadStart: both sizes are equal where nothing is encoded")
    if len(said.sha256) != 64 or not set(said.sha256) <= set("0123456789abcdef"):
        raise Refusal(422, "malformed", "UploadStart.sha256 is no SHA-256 in lower-case hex")


async def _blocks(request: Request, offset: int) -> AsyncIterator[tuple[int, bytes]]:
    """The body in blocks, each with where it begins; a cut line first gives what came before it."""
    block, at = bytearray(), offset
    cut: Exception | None = None
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                block += await anext(stream)
        except StopAsyncIteration:
            break
        except TimeoutError:
            cut = Refusal(
                408, "upload_stalled", f"nothing came for {STALL_SECONDS:.0f} s; go on where it stopped"
            )
            break
        except ClientDisconnect as gone:
            cut = gone
            break
        if len(block) >= BLOCK_BYTES:
            yield at, bytes(block)
            at += len(block)
            block.clear()
    if block:
        yield at, bytes(block)
    if cut is not None:
        raise cut


def _names_another(file: Path, device: str) -> bool:
    """Whether the result says that it is of another client."""
    try:
        said = arrays.read_header(arrays.FilePayload(file)).values.get("client")
    except arrays.Malformed:
        return False
    return isinstance(said, str) and said != device


def _disk_full() -> Refusal:
    words = "the coordinator's disk is full; nothing of this piece was kept, try again later"
    return Refusal(507, "disk_full", words)
