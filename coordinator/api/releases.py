"""Operator API: signed releases, their expiry, the online keys, and publishing what people signed."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from securesystemslib.signer import SSlibKey

from coordinator.api.deps import FileProgress, RequestBody, ServicesDep
from coordinator.context.services import Services
from coordinator.db import registry
from coordinator.errors import Refusal
from coordinator.project_names import DEFAULT_PROJECT
from coordinator.releases import roles
from coordinator.releases.renewal import SIGN_AND_PUBLISH, Need, needs, warnings
from coordinator.releases.repository import Release as Stored
from coordinator.releases.repository import Repository
from coordinator.releases.role_states import RoleState

router = APIRouter(prefix="/releases", tags=["releases"])


class Release(BaseModel):
    """A signed version of a model."""

    model: str
    version: int
    model_bytes: int
    model_sha256: str
    manifest_sha256: str


class ReleasesStatus(BaseModel):
    """`warnings`: what people must do, and until when. `needs`: that, and what else waits for signatures, with commands."""

    exists: bool
    roles: list[RoleState] = Field(description="`offline`: people must sign it again before it expires.")
    releases: list[Release]
    warnings: list[str]
    needs: list[Need]


class PublishRequest(RequestBody):
    """Uploaded files by SHA-256: signed targets, newer roots in order, and each new target by its path."""

    targets: str = Field(max_length=64)
    roots: list[str] = Field([], max_length=256)
    files: dict[str, str] = Field({}, max_length=10_000)


class Published(BaseModel):
    version: int = Field(description="Version of the published targets.")


class SignedMetadata(BaseModel):
    """Every root in order and the current targets, each as the text that was signed."""

    roots: list[str]
    targets: str


@router.get("")
def list_releases(services: ServicesDep) -> list[Release]:
    """The published releases of the project's models."""
    return [_render(each) for each in visible_releases(services)]


@router.get("/status")
def get_releases_status(services: ServicesDep) -> ReleasesStatus:
    """The state of the repository."""
    repository, now = services.releases, services.clock()
    states = repository.state()
    return ReleasesStatus(
        exists=repository.exists,
        roles=states,
        releases=[_render(each) for each in visible_releases(services)],
        warnings=warnings(states, now),
        needs=[*([] if repository.exists else [_FIRST]), *needs(states, now), *_new_keys(repository)],
    )


@router.get("/metadata")
def get_signed_metadata(services: ServicesDep) -> SignedMetadata:
    """The signed metadata, on top of which people sign."""
    repository = services.releases
    return SignedMetadata(
        roots=[each.decode() for each in repository.roots()], targets=repository.targets().decode()
    )


@router.get("/online-keys")
def get_online_keys(services: ServicesDep) -> dict[str, dict[str, Any]]:
    """The public keys that the next root and targets must name."""
    return _public(services.releases.online_keys())


@router.post("/online-keys/rotate")
def rotate_online_keys(services: ServicesDep) -> dict[str, dict[str, Any]]:
    """Generates new online keys. They sign once people have published a root and targets that name them."""
    return _public(services.releases.online_keys(rotate=True))


@router.get("/files/{sha256}")
def get_upload(sha256: str, services: ServicesDep) -> FileProgress:
    """The progress of an upload."""
    return FileProgress(offset=services.incoming_releases.offset(sha256))


@router.put("/files/{sha256}")
async def upload_file(
    sha256: str, request: Request, services: ServicesDep, offset: Annotated[int, Query(ge=0, le=2**53)]
) -> FileProgress:
    """The next piece of a file, as the raw body."""
    piece = await request.body()
    reached = await run_in_threadpool(services.incoming_releases.write, sha256, offset, piece)
    return FileProgress(offset=reached)


@router.post("")
def publish_releases(request: PublishRequest, services: ServicesDep) -> Published:
    """Verifies the signed metadata and the uploads, and publishes all of them to devices or none."""
    incoming = services.incoming_releases
    uploads = [request.targets, *request.roots, *request.files.values()]
    try:
        version = services.releases.publish(
            incoming.read(request.targets, roles.METADATA_LIMITS_BYTES[roles.TARGETS]),
            {path: incoming.file(sha256) for path, sha256 in request.files.items()},
            [incoming.read(each, roles.METADATA_LIMITS_BYTES[roles.ROOT]) for each in request.roots],
        )
    except Refusal:
        incoming.remove(uploads)  # they must be sent again, whatever was wrong
        raise
    incoming.remove(uploads)
    return Published(version=version)


_FIRST = Need(
    "Nothing is signed yet: devices can install no release.",
    (
        "fedloop release keygen keys",
        "fedloop release online-keys > online.json",
        "fedloop release init --keys keys --online online.json --staging stick",
        *SIGN_AND_PUBLISH,
    ),
)


def _new_keys(repository: Repository) -> list[Need]:
    waiting = repository.unnamed_online_roles()
    if not waiting:
        return []
    what = f"New keys of the coordinator wait until a root and targets name them: {', '.join(waiting)}"
    commands = (
        "fedloop release online-keys > online.json",
        "fedloop release rotate-online --online online.json --staging stick",
        *SIGN_AND_PUBLISH,
    )
    return [Need(what, commands)]


def visible_releases(services: Services) -> list[Stored]:
    """The published releases of models that the project has. `default` also has those that no registry has."""
    owners = services.database.read(registry.owners)
    return [
        each
        for each in services.releases.releases()
        if owners.get(each.name.model, DEFAULT_PROJECT) == services.project
    ]


def _render(release: Stored) -> Release:
    return Release(model=release.name.model, version=release.name.version, **vars(release))


def _public(keys: dict[str, SSlibKey]) -> dict[str, dict[str, Any]]:
    return {role: {"keyid": key.keyid, **key.to_dict()} for role, key in keys.items()}
