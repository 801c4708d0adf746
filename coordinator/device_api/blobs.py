"""Downloads of the blobs that an open task of the caller refers to, entire or by ranges. The hash is the ETag."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse

from coordinator.api.deps import ServicesDep
from coordinator.db import rounds
from coordinator.device_api.identity import CallerDep
from coordinator.errors import Refusal

router = APIRouter()


class BlobResponse(FileResponse):
    """A file response with larger blocks, since each costs a hop to a thread and back."""

    chunk_size = 2**20


@router.get("/blobs/{sha256}")
async def fetch_blob(sha256: str, request: Request, caller: CallerDep, services: ServicesDep) -> FileResponse:
    tasks = await run_in_threadpool(services.database.read, lambda at: rounds.live_tasks(at, caller.id))
    if not any(sha256 in rounds.blobs_of(task.offer) for task in tasks):
        if is_digest(sha256) and services.blobs.path(sha256).exists():
            raise Refusal(403, "not_yours", "no open task of this device refers to this blob")
        raise Refusal(404, "not_found", "there is no such blob")
    path = services.blobs.require(sha256)
    require_range(request.headers.get("range"), path.stat().st_size)
    return BlobResponse(
        path,
        media_type="application/octet-stream",
        headers={"etag": f'"{sha256}"', "cache-control": "private, immutable"},
    )


def require_range(header: str | None, size_bytes: int) -> None:
    """Requires at most one range, as a device that resumes a download sends; many small ones cost more than they carry.

    Raises:
        Refusal: 416 `bad_range`.
    """
    if header is None:
        return
    match = re.fullmatch(r"bytes=(\d{1,18})-(\d{0,18})", header)
    if match is None or not int(match[1]) <= int(match[2] or size_bytes) or int(match[1]) >= size_bytes:
        raise Refusal(416, "bad_range", f"expected one range bytes=FIRST- within {size_bytes} bytes")


def is_digest(text: str) -> bool:
    """Whether this is a SHA-256 in lower-case hex."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
