"""Between a staging folder and a coordinator: fetching what it has, sending what was signed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from coordinator.errors import UserError
from coordinator.operator_client import OperatorClient
from coordinator.releases.staging import Staging

PIECE_BYTES = 2 * 2**20

Progress = Callable[[str, int, int], None]
"""Hears a target path, bytes sent, and bytes in all."""


def fetch(client: OperatorClient, staging: Staging) -> list[str]:
    """Brings the staging folder up to what the coordinator has; what `Staging.update` dropped."""
    found = client.get("/releases/metadata")
    return staging.update([text.encode() for text in found["roots"]], found["targets"].encode())


def publish(client: OperatorClient, staging: Staging, progress: Progress) -> int:
    """Sends what was signed; the coordinator verifies it and makes it what devices see. The version of targets.

    Raises:
        UserError: signatures are missing, or nothing is staged; or the coordinator's refusal, with its code.
    """
    if not staging.folder.is_dir():
        raise UserError(f"--staging {staging.folder}: there is no such folder")
    targets = staging.next_targets() or staging.published_targets()
    root = staging.next_root()
    if targets is None or (staging.next_targets() is None and root is None):
        raise UserError(f"{staging.folder}: nothing is staged; begin with `fedloop release add`")
    if missing := staging.missing():
        raise UserError(
            f"{staging.folder}: not all have signed yet: {'; '.join(missing)}; `fedloop release sign`"
        )
    files = {path: _send(client, path, file, progress) for path, file in staging.new_files().items()}
    roots = [root.to_bytes()] if root is not None else []
    body = {
        "targets": _send_bytes(client, targets.to_bytes()),
        "roots": [_send_bytes(client, each) for each in roots],
        "files": files,
    }
    version = int(client.post("/releases", body)["version"])
    staging.now_published()
    return version


def _send(client: OperatorClient, path: str, file: Path, progress: Progress) -> str:
    """Uploads a file from where an earlier attempt stopped; its SHA-256."""
    size = file.stat().st_size
    with file.open("rb") as source:
        sha256 = hashlib.file_digest(source, "sha256").hexdigest()
        offset = int(client.get(f"/releases/files/{sha256}")["offset"])
        while offset < size:
            source.seek(offset)
            piece = source.read(PIECE_BYTES)
            offset = int(client.put_bytes(f"/releases/files/{sha256}", piece, offset=offset)["offset"])
            progress(path, offset, size)
    return sha256


def _send_bytes(client: OperatorClient, content: bytes) -> str:
    sha256 = hashlib.sha256(content).hexdigest()
    offset = int(client.get(f"/releases/files/{sha256}")["offset"])
    while offset < len(content):
        piece = content[offset : offset + PIECE_BYTES]
        offset = int(client.put_bytes(f"/releases/files/{sha256}", piece, offset=offset)["offset"])
    return sha256
