"""Transfers between a staging folder and a coordinator: fetch its metadata, publish signed documents."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

from coordinator.errors import UserError
from coordinator.operator.client import OnBytes, OperatorClient
from coordinator.operator.staging import Staging

Progress = Callable[[str, int], OnBytes]
"""Called with a target path and its total bytes; returns what receives the bytes sent."""


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
    files = {}
    for path, file in staging.new_files().items():
        with file.open("rb") as source:
            files[path] = _send(client, source, progress(path, file.stat().st_size))
    roots = [root.to_bytes()] if root is not None else []
    body = {
        "targets": _send_bytes(client, targets.to_bytes()),
        "roots": [_send_bytes(client, each) for each in roots],
        "files": files,
    }
    version = int(client.post("/releases", body)["version"])
    staging.mark_published()
    return version


def _send(client: OperatorClient, source: io.BufferedReader | io.BytesIO, on_bytes: OnBytes) -> str:
    """Uploads a file; returns its SHA-256."""
    sha256 = hashlib.file_digest(source, "sha256").hexdigest()
    client.upload(f"/releases/files/{sha256}", source, source.seek(0, io.SEEK_END), on_bytes)
    return sha256


def _send_bytes(client: OperatorClient, content: bytes) -> str:
    return _send(client, io.BytesIO(content), lambda count: None)
