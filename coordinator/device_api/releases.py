"""Signed releases for devices: TUF metadata and targets as files, whole or by ranges, and the first root to trust.

What is served proves itself, so nothing here decides who may have it: any enrolled device. Every name but
`timestamp.json` holds a version or a hash and never changes, so it may be kept for ever.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from coordinator.api.deps import Serving
from coordinator.device_api.blobs import BlobResponse, require_range
from coordinator.device_api.identity import Calling
from coordinator.errors import Refusal

FOR_EVER = "private, max-age=31536000, immutable"
_CHANGES = "no-cache"

router = APIRouter(prefix="/releases")


@router.get("/root")
async def first_root(caller: Calling, services: Serving) -> Response:
    """The first root there was: what a device pins that was not given one. All later ones follow from it."""
    root = await run_in_threadpool(services.releases.root, 1)
    return Response(root, media_type="application/json", headers={"cache-control": _CHANGES})


@router.get("/metadata/{name}")
async def metadata(name: str, request: Request, caller: Calling, services: Serving) -> Response:
    """`timestamp.json`, or `N.<role>.json`."""
    path = await run_in_threadpool(services.releases.metadata_file, name)
    if path is None:
        raise Refusal(404, "not_found", "there is no such metadata")
    if name == "timestamp.json":
        content = await run_in_threadpool(path.read_bytes)  # whole: the file may be replaced any moment
        return Response(content, media_type="application/json", headers={"cache-control": _CHANGES})
    return _file(path, request, "application/json", name)


@router.get("/targets/{path:path}")
async def target(path: str, request: Request, caller: Calling, services: Serving) -> Response:
    """A target, by its path with the SHA-256 before the file name."""
    found = await run_in_threadpool(services.releases.target_file, path)
    if found is None:
        raise Refusal(404, "not_found", "there is no such target")
    return _file(found, request, "application/octet-stream", found.name.partition(".")[0])


def _file(path: Path, request: Request, media_type: str, tag: str) -> Response:
    etag = f'"{tag}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"etag": etag, "cache-control": FOR_EVER})
    try:
        require_range(request.headers.get("range"), path.stat().st_size)
    except FileNotFoundError:  # of a past state, swept away this moment
        raise Refusal(404, "not_found", "this is not kept any more") from None
    return BlobResponse(path, media_type=media_type, headers={"etag": etag, "cache-control": FOR_EVER})
