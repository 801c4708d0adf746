"""Downloads of a device, entire or by ranges: the blobs of its open tasks, and signed releases.

A blob's hash is its ETag. The files of releases (TUF metadata and targets) are signed, so any enrolled device may fetch
them. Every name but `timestamp.json` contains a version or a hash and its content never changes, so clients may cache it for
ever.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, Response

from coordinator.context.services import ServicesDep
from coordinator.db import rounds
from coordinator.device_api.identity import CallerDep
from coordinator.errors import Refusal
from coordinator.model_references import is_sha256

FOR_EVER = "private, max-age=31536000, immutable"
_CHANGES = "no-cache"

router = APIRouter()


class BlobResponse(FileResponse):
    """A file response with larger blocks, since each costs a hop to a thread and back."""

    chunk_size = 2**20


@router.get("/blobs/{sha256}")
async def fetch_blob(sha256: str, request: Request, caller: CallerDep, services: ServicesDep) -> FileResponse:
    tasks = await run_in_threadpool(services.database.read, lambda at: rounds.live_tasks(at, caller))
    if not any(sha256 in rounds.blobs_of(task.offer) for task in tasks):
        if is_sha256(sha256) and services.blobs.path(sha256).exists():
            raise Refusal(403, "not_yours", "no open task of this device refers to this blob")
        raise Refusal(404, "not_found", "there is no such blob")
    path = services.blobs.require(sha256)
    _require_range(request.headers.get("range"), path.stat().st_size)
    return BlobResponse(
        path,
        media_type="application/octet-stream",
        headers={"etag": f'"{sha256}"', "cache-control": "private, immutable"},
    )


@router.get("/releases/root")
async def first_root(caller: CallerDep, services: ServicesDep) -> Response:
    """The first root, which a device without a configured root pins. All later roots chain to it."""
    root = await run_in_threadpool(services.releases.root, 1)
    return Response(root, media_type="application/json", headers={"cache-control": _CHANGES})


@router.get("/releases/metadata/{name}")
async def metadata(name: str, request: Request, caller: CallerDep, services: ServicesDep) -> Response:
    """`timestamp.json`, or `N.<role>.json`."""
    path = await run_in_threadpool(services.releases.stored.metadata_file, name)
    if path is None:
        raise Refusal(404, "not_found", "there is no such metadata")
    if name == "timestamp.json":
        content = await run_in_threadpool(path.read_bytes)  # at once: the file may be replaced at any moment
        return Response(content, media_type="application/json", headers={"cache-control": _CHANGES})
    return _file(path, request, "application/json", name)


@router.get("/releases/targets/{path:path}")
async def target(path: str, request: Request, caller: CallerDep, services: ServicesDep) -> Response:
    """A target, by its path with the SHA-256 before the file name."""
    file = await run_in_threadpool(services.releases.stored.target_file, path)
    if file is None:
        raise Refusal(404, "not_found", "there is no such target")
    return _file(file, request, "application/octet-stream", file.name.partition(".")[0])


def _require_range(header: str | None, size_bytes: int) -> None:
    """Requires at most one range, as a device that resumes a download sends; many small ones cost more than they carry.

    Raises:
        Refusal: 416 `bad_range`.
    """
    if header is None:
        return
    match = re.fullmatch(r"bytes=(\d{1,18})-(\d{0,18})", header)
    if match is None or not int(match[1]) <= int(match[2] or size_bytes) or int(match[1]) >= size_bytes:
        raise Refusal(416, "bad_range", f"expected one range bytes=FIRST- within {size_bytes} bytes")


def _file(path: Path, request: Request, media_type: str, tag: str) -> Response:
    etag = f'"{tag}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"etag": etag, "cache-control": FOR_EVER})
    try:
        _require_range(request.headers.get("range"), path.stat().st_size)
    except FileNotFoundError:  # of an old state, removed at this moment
        raise Refusal(404, "not_found", "this file is no longer kept") from None
    return BlobResponse(path, media_type=media_type, headers={"etag": etag, "cache-control": FOR_EVER})
