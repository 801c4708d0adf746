"""Transfers of versions between a folder and a coordinator: sent in pieces, fetched file by file, both checked by hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coordinator.errors import UserError
from coordinator.operator.client import OnBytes, OperatorClient, Refused
from coordinator.output_folders import require_new
from coordinator.registry.contents import Contents
from coordinator.registry.kinds import Kind
from edge_client.files import file_sha256, make_durably


def add(
    client: OperatorClient,
    name: str,
    kind: Kind,
    contents: Contents,
    parents: Sequence[str] = (),
    *,
    renumber: bool = False,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, Any]:
    """Registers files as the next version of a model, and sends those that the coordinator lacks. Returns the version.

    Raises:
        Refused, Unreachable: from the client.
        UserError: a file changed meanwhile.
    """
    request = {
        "kind": kind,
        "files": {
            path: {"sha256": content.sha256, "size_bytes": content.size_bytes}
            for path, content in contents.items()
        },
        "parents": list(parents),
        "renumber": renumber,
    }
    by_hash = {content.sha256: content for content in contents.values()}
    while True:
        try:
            version: dict[str, Any] = client.post(f"/models/{quote(name, safe='')}/versions", request)
            return version
        except Refused as refused:
            if refused.code != "missing_files":
                raise
            missing = [by_hash.pop(digest) for digest in refused.details["missing"] if digest in by_hash]
            if not missing:
                raise  # it was sent already
        for content in missing:
            try:
                with content.place.open("rb") as file:
                    client.upload(f"/model-files/{content.sha256}", file, content.size_bytes, on_bytes)
            except OSError as error:
                raise UserError(f"{content.place}: {error.strerror}") from None


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
