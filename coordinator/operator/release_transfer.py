"""Transfers between a staging folder and a coordinator: fetch its metadata, publish signed documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from coordinator.errors import UserError
from coordinator.operator.client import OperatorClient
from coordinator.operator.staging import Staging

PIECE_BYTES = 2 * 2**20

Progress = Callable[[str, int, int], None]
"""Called with a target path, the bytes sent, and the total bytes."""


def fetch(client: OperatorClient, staging: Staging) -> list[str]:
    """Updates the staging folder from the coordinator; returns the documents that `Staging.update` dropped."""
    metadata = client.get("/releases/metadata")
    return staging.update([text.encode() for text in metadata["roots"]], metadata["targets"].encode())


def publish(client: OperatorClient, staging: Staging, progress: Progress) -> int:
    """Sends signed documents and new files; the coordinator verifies and publishes them. Returns the version of targets.

    Raises:
        UserError: signatures are missing, or nothing is staged; or the coordinator's refusal, with its code.
    """
    if not staging.folder.is_dir():
        raise UserError(f"--staging {staging.folder}: there is no such folder")
    targets = staging.next_targets() or staging.published_targets()
    root = staging.next_root()
    if targets is None or (staging.next_targets() is None and root is None):
        raise UserError(f"{staging.folder}: nothing is staged; begin with `fedloop release add`")
    if missing := staging.missing_signatures():
        raise UserError(
            f"{staging.folder}: signatures are missing: {'; '.join(missing)}; `fedloop release sign`"
        )
    files = {path: _send(client, path, file, progress) for path, file in staging.new_files().items()}
    roots = [root.to_bytes()] if root is not None else []
    body = {
        "targets": _send_bytes(client, targets.to_bytes()),
        "roots": [_send_bytes(client, each) for each in roots],
        "files": files,
    }
    version = int(client.post("/releases", body)["version"])
    staging.mark_published()
    return version


def _send(client: OperatorClient, path: str, file: Path, progress: Progress) -> str:
    """Uploads a file from where an earlier attempt stopped; returns its SHA-256."""
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
