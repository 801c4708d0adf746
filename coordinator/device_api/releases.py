"""Signed releases for devices: TUF metadata and targets as files, entire or by ranges, and the first root to trust.

The files are signed, so any enrolled device may fetch them. Every name but `timestamp.json` contains a version or a hash
and its content never changes, so clients may cache it for ever.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from coordinator.api.deps import ServicesDep
from coordinator.device_api.blobs import BlobResponse, require_range
from coordinator.device_api.identity import CallerDep
from coordinator.errors import Refusal

FOR_EVER = "private, max-age=31536000, immutable"
_CHANGES = "no-cache"

router = APIRouter(prefix="/releases")


@router.get("/root")
async def first_root(caller: CallerDep, services: ServicesDep) -> Response:
    """The first root, which a device without a configured root pins. All later roots chain to it."""
    root = await run_in_threadpool(services.releases.root, 1)
    return Response(root, media_type="application/json", headers={"cache-control": _CHANGES})


@router.get("/metadata/{name}")
async def metadata(name: str, request: Request, caller: CallerDep, services: ServicesDep) -> Response:
    """`timestamp.json`, or `N.<role>.json`."""
    path = await run_in_threadpool(services.releases.metadata_file, name)
    if path is None:
        raise Refusal(404, "not_found", "there is no such metadata")
    if name == "timestamp.json":
        content = await run_in_threadpool(path.read_bytes)  # at once: the file may be replaced at any moment
        return Response(content, media_type="application/json", headers={"cache-control": _CHANGES})
    return _file(path, request, "application/json", name)


@router.get("/targets/{path:path}")
async def target(path: str, request: Request, caller: CallerDep, services: ServicesDep) -> Response:
    """A target, by its path with the SHA-256 before the file name."""
    file = await run_in_threadpool(services.releases.target_file, path)
    if file is None:
        raise Refusal(404, "not_found", "there is no such target")
    return _file(file, request, "application/octet-stream", file.name.partition(".")[0])


def _file(path: Path, request: Request, media_type: str, tag: str) -> Response:
    etag = f'"{tag}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"etag": etag, "cache-control": FOR_EVER})
    try:
        require_range(request.headers.get("range"), path.stat().st_size)
    except FileNotFoundError:  # of an old state, removed at this moment
        raise Refusal(404, "not_found", "this file is no longer kept") from None
    return BlobResponse(path, media_type=media_type, headers={"etag": etag, "cache-control": FOR_EVER})
