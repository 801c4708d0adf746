"""Downloads: what an open task of the caller refers to, whole or by ranges. The hash is the ETag."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from sqlalchemy import Connection

from coordinator.api.deps import Serving
from coordinator.db import rounds
from coordinator.device_api.identity import Calling
from coordinator.errors import Refusal

router = APIRouter()


class BlobResponse(FileResponse):
    """Larger blocks: each costs a hop to a thread and back."""

    chunk_size = 2**20


@router.get("/blobs/{sha256}")
async def fetch_blob(
    sha256: str,
    request: Request,
    caller: Calling,
    services: Serving,
) -> FileResponse:
    granted = await run_in_threadpool(services.database.read, lambda at: _is_granted(at, caller.id, sha256))
    if not granted:
        if _is_digest(sha256) and services.blobs.path(sha256).exists():
            raise Refusal(403, "not_yours", "no open task of this device refers to this blob")
        raise Refusal(404, "not_found", "there is no such blob")
    require_range(request.headers.get("range"), services.blobs.path(sha256).stat().st_size)
    return BlobResponse(
        services.blobs.path(sha256),
        media_type="application/octet-stream",
        headers={"etag": f'"{sha256}"', "cache-control": "private, immutable"},
    )


def require_range(asked: str | None, size_bytes: int) -> None:
    """One range, as a device that goes on with a download asks for it; many small ones cost more than they carry."""
    if asked is None:
        return
    found = re.fullmatch(r"bytes=(\d{1,18})-(\d{0,18})", asked)
    if found is None or not int(found[1]) <= int(found[2] or size_bytes) or int(found[1]) >= size_bytes:
        raise Refusal(416, "bad_range", f"expected one range bytes=FIRST- within {size_bytes} bytes")


def _is_granted(connection: Connection, device: str, digest: str) -> bool:
    return any(digest in rounds.blobs_of(task.offer) for task in rounds.live_tasks(connection, device))


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
