"""Fetches the files of a version from a coordinator into a folder. Each is checked by its hash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coordinator.errors import UserError
from coordinator.operator.client import OnBytes, OperatorClient
from coordinator.output_folders import require_new
from edge_client.files import file_sha256, make_durably


def export(client: OperatorClient, version: Mapping[str, Any], out: Path, on_bytes: OnBytes) -> None:
    """Fetches the files of a version into the new or empty folder `out`.

    Raises:
        UserError: `out` is not empty or not writable, or a file does not have the hash in the registry.
    """
    require_new(out)
    for file in version["files"]:
        place = out / file["path"]
        source = f"/versions/{version['version']}/files/{quote(file['path'])}"

        def write(temporary: Path, source: str = source, file: Mapping[str, Any] = file) -> None:
            client.fetch(source, temporary, on_bytes)
            if file_sha256(temporary) != file["sha256"]:
                raise UserError(
                    f"{file['path']}: the received file does not have the hash in the registry; try again"
                )

        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            make_durably(place, write)
        except OSError as error:
            raise UserError(f"--out {place}: cannot be written: {error.strerror}") from None
