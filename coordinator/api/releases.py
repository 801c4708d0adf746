"""Operator API: signed releases. What there is, when it expires, the online keys, and taking in what people signed."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from securesystemslib.signer import SSlibKey

from coordinator.api.deps import Serving
from coordinator.errors import Refusal
from coordinator.releases import roles
from coordinator.releases.renewal import warnings
from coordinator.releases.repository import Release as Stored

router = APIRouter(prefix="/releases", tags=["releases"])


class Release(BaseModel):
    """A version of a model that was signed."""

    model: str
    version: int
    model_bytes: int
    model_sha256: str
    manifest_sha256: str


class SigningRole(BaseModel):
    """One role of the repository. `offline`: people must sign it anew before it expires."""

    role: str
    version: int
    expires: datetime
    offline: bool
    is_valid: bool


class ReleasesStatus(BaseModel):
    """`warnings`: what people must do, and until when."""

    exists: bool
    roles: list[SigningRole]
    releases: list[Release]
    warnings: list[str]


class Progress(BaseModel):
    """Bytes of an upload that are here."""

    offset: int


class PublishRequest(BaseModel):
    """Uploaded files by SHA-256: signed targets, newer roots in order, and each new target by its path."""

    model_config = {"extra": "forbid"}

    targets: str = Field(max_length=64)
    roots: list[str] = Field([], max_length=256)
    files: dict[str, str] = Field({}, max_length=10_000)


class Published(BaseModel):
    version: int = Field(description="Of targets.")


class SignedMetadata(BaseModel):
    """Every root, the first one first, and the targets that count, each as the text that was signed."""

    roots: list[str]
    targets: str


@router.get("")
def list_releases(services: Serving) -> list[Release]:
    """The releases that exist."""
    return [_shown(each) for each in services.releases.releases()]


@router.get("/status")
def get_releases_status(services: Serving) -> ReleasesStatus:
    """How the repository stands."""
    states = services.releases.state()
    return ReleasesStatus(
        exists=services.releases.exists,
        roles=[SigningRole(**vars(each)) for each in states],
        releases=[_shown(each) for each in services.releases.releases()],
        warnings=warnings(states, services.clock()),
    )


@router.get("/metadata")
def get_signed_metadata(services: Serving) -> SignedMetadata:
    """What people sign on top of."""
    repository = services.releases
    return SignedMetadata(
        roots=[each.decode() for each in repository.roots()], targets=repository.targets().decode()
    )


@router.get("/online-keys")
def get_online_keys(services: Serving) -> dict[str, dict[str, Any]]:
    """The public keys that the next root and targets are to name."""
    return _public(services.releases.online_keys())


@router.post("/online-keys/rotate")
def rotate_online_keys(services: Serving) -> dict[str, dict[str, Any]]:
    """Makes new online keys. They sign once people have published a root and targets that name them."""
    return _public(services.releases.online_keys(rotate=True))


@router.get("/files/{sha256}")
def get_upload(sha256: str, services: Serving) -> Progress:
    """How far an upload is."""
    return Progress(offset=services.incoming_releases.offset(sha256))


@router.put("/files/{sha256}")
async def upload_file(
    sha256: str, request: Request, services: Serving, offset: Annotated[int, Query(ge=0)]
) -> Progress:
    """The next piece of a file, as the raw body."""
    piece = await request.body()
    reached = await run_in_threadpool(services.incoming_releases.write, sha256, offset, piece)
    return Progress(offset=reached)


@router.post("")
def publish_releases(asked: PublishRequest, services: Serving) -> Published:
    """Verifies what was signed and uploaded, and makes it what devices see. All of it or nothing."""
    incoming = services.incoming_releases
    sent = [asked.targets, *asked.roots, *asked.files.values()]
    try:
        version = services.releases.publish(
            incoming.read(asked.targets, roles.METADATA_LIMITS_BYTES[roles.TARGETS]),
            {path: incoming.file(sha256) for path, sha256 in asked.files.items()},
            [incoming.read(each, roles.METADATA_LIMITS_BYTES[roles.ROOT]) for each in asked.roots],
        )
    except Refusal:
        incoming.forget(sent)  # whatever was wrong with it, it is sent anew
        raise
    incoming.forget(sent)
    return Published(version=version)


def _shown(release: Stored) -> Release:
    return Release(
        model=release.name.model,
        version=release.name.version,
        model_bytes=release.model_bytes,
        model_sha256=release.model_sha256,
        manifest_sha256=release.manifest_sha256,
    )


def _public(keys: dict[str, SSlibKey]) -> dict[str, dict[str, Any]]:
    return {role: {"keyid": key.keyid, **key.to_dict()} for role, key in keys.items()}
