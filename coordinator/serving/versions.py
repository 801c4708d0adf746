"""Versions that deployments serve, as folders on this machine.

A version of the registry is fetched once, checked by its hashes, and kept in the server's home; so what is served goes on without a
coordinator. A folder is served from where it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from coordinator.datacenter.documents import PACKED
from coordinator.errors import UserError
from coordinator.model_references import PARAMS, is_version, parse_reference
from coordinator.operator import version_export
from coordinator.operator.client import OperatorClient, Unreachable
from edge_client.data.connector import DataProblem
from edge_client.files import file_sha256, make_folder, read_regular, sync_folder, write_durably
from edge_client.serving import tokenizer_json
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import MODEL_NAME
from edge_client.wire.schema import DataSchema
from models import user_code

if TYPE_CHECKING:
    from coordinator.datacenter.predictions import Model

_RECORD = "version.json"


@dataclass(frozen=True)
class StoredVersion:
    """A version on this machine.

    Attributes:
        number: of the registry; of a folder the beginning of its hash.
        alias: of the reference, or empty.
        model: as `models.serving.opening.open_model` takes it.
        identity: SHA-256 of the file with the weights.
        allowed_code: as `Versions` was given it.
    """

    number: str
    alias: str
    folder: Path
    model: dict[str, Any]
    schema: DataSchema
    identity: str
    allowed_code: tuple[str, ...] = ()

    @property
    def weights_bytes(self) -> int:
        """Size of the file with the weights."""
        try:
            return Path(self.model.get("params") or self.folder / MODEL_NAME).stat().st_size
        except OSError:
            return 0

    @property
    def platform(self) -> str:
        """As the metadata of the protocol names it."""
        return "fedloop_litert" if self.model.get("release") else "fedloop_torch"


class Versions:
    """Finds, fetches and checks versions. `connect`: makes the client of the coordinator when one is needed; `open_model`:
    `coordinator.datacenter.predictions.open_model`.

    `allowed_code`: models of a user's own code, `package.module:build`, that may be built here.
    """

    def __init__(
        self,
        home: Path,
        connect: Callable[[], OperatorClient],
        open_model: Callable[[Path], Model],
        allowed_code: tuple[str, ...] = (),
    ) -> None:
        self._home = home / "versions"
        self._connect = connect
        self._open_model = open_model
        self.allowed_code = allowed_code
        self._client: OperatorClient | None = None

    def find(self, reference: str) -> StoredVersion:
        """The version that a deployment's `model` means now. Blocks: for a transfer, for hashing.

        Raises:
            UserError: there is none, or it cannot be served. Unreachable: the coordinator does not answer, and no version of this
                reference is on this machine.
        """
        if not is_version(reference):
            return self._open(Path(reference), "", "")
        parsed = parse_reference(reference)
        try:
            found = self._ask(reference)
        except Unreachable:
            if (number := self._last(reference)) is None:
                raise
            folder = self._home / parsed.model / str(number)
        else:
            number = int(str(found["version"]).rpartition(":")[2])
            folder = self._fetch(parsed.model, number, found)
        return self._open(folder, str(number), parsed.alias or "")

    def current_number(self, reference: str) -> str | None:
        """The number that a reference means now, asked of the coordinator; None of a folder.

        Raises:
            UserError, Unreachable: as `find`.
        """
        if not is_version(reference):
            return None
        return str(self._ask(reference)["version"]).rpartition(":")[2]

    def remember(self, reference: str, stored: StoredVersion) -> None:
        """Has `find` take this version where the coordinator does not answer. Raises: OSError: it cannot be written."""
        if is_version(reference) and self._last(reference) != int(stored.number):
            make_folder(self._home)
            known = {"reference": reference, "number": int(stored.number)}
            write_durably(self._record_of(reference), json.dumps(known).encode())

    def record_metrics(self, reference: str, stage: str, figures: dict[str, float]) -> None:
        """Stores figures of a version in the registry, in place of earlier ones. Raises: UserError, Unreachable: from the client."""
        self._connected().put(f"/versions/{quote(reference, safe='')}/metrics/{stage}", {"figures": figures})

    def _ask(self, reference: str) -> dict[str, Any]:
        found: dict[str, Any] = self._connected().get(f"/versions/{quote(reference, safe='')}")
        return found

    def _connected(self) -> OperatorClient:
        """Raises: Unreachable: also where this machine has no token for the coordinator."""
        if self._client is None:
            try:
                self._client = self._connect()
            except UserError as error:
                raise Unreachable(str(error)) from None
        return self._client

    def _fetch(self, model: str, number: int, found: dict[str, Any]) -> Path:
        folder = self._home / model / str(number)
        make_folder(folder.parent)
        with (self._home / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a command may fetch the same version beside the server
            if not (folder / _RECORD).is_file():
                if folder.exists():
                    shutil.rmtree(folder)
                version_export.export(self._connected(), found, folder, lambda count: None)
                files = {file["path"]: file["sha256"] for file in found["files"]}
                write_durably(folder / _RECORD, json.dumps({"files": files}).encode())
                sync_folder(folder)
        return folder

    def _require_files(self, folder: Path) -> None:
        """Raises: UserError: a file is not the one that was fetched."""
        try:
            files = json.loads(read_regular(folder / _RECORD))["files"]
            for path, digest in files.items():
                if file_sha256(folder / path) != digest:
                    raise UserError(
                        f"{folder / path}: was changed or damaged since it was fetched; remove {folder} to fetch it again"
                    )
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder}: cannot be read: {error}; remove it to fetch it again") from None

    def _open(self, folder: Path, number: str, alias: str) -> StoredVersion:
        if number:
            self._require_files(folder)
        opened = self._open_model(folder)
        _require_tokenizer(folder, opened.schema)
        description = opened.description
        weights = folder / (MODEL_NAME if description is None else PARAMS)
        model: dict[str, Any] = {"folder": str(folder), "release": description is None}
        if description is not None:
            self._require_allowed(str(description["name"]))
            model |= {"params": str(folder / PARAMS), "description": dict(description)}
            if (folder / PACKED).is_file():
                model["packed"] = str(folder / PACKED)
        try:
            identity = file_sha256(weights)
        except (OSError, ManifestError) as error:
            raise UserError(f"{weights}: {error}") from None
        if description is not None:
            digest = hashlib.sha256(json.dumps(dict(description), sort_keys=True).encode()).hexdigest()
            model["onnx"] = str(self._home.parent / "onnx" / f"{identity[:32]}-{digest[:16]}.onnx")
        return StoredVersion(
            number or identity[:12], alias, folder, model, opened.schema, identity, self.allowed_code
        )

    def _require_allowed(self, name: str) -> None:
        if user_code.is_reference(name) and name not in self.allowed_code:
            raise UserError(
                f"model {name!r} is code of your own, which this server would run; allow it: --allow-code {name}"
            )

    def _record_of(self, reference: str) -> Path:
        return self._home / f"{hashlib.sha256(reference.encode()).hexdigest()[:32]}.json"

    def _last(self, reference: str) -> int | None:
        """The number of the version that the reference meant last, if it is on this machine."""
        try:
            known = json.loads(read_regular(self._record_of(reference)))
            number = int(known["number"])
        except (OSError, ValueError, KeyError):
            return None
        folder = self._home / parse_reference(reference).model / str(number)
        return number if (folder / _RECORD).is_file() else None


def _require_tokenizer(folder: Path, schema: DataSchema) -> None:
    """Opens the tokenizer of a model's texts, if it has one, so that the first request need not wait for it.

    Raises:
        UserError: it is broken, or the library is not installed.
    """
    if schema.text is None or not schema.text.tokenizer:
        return
    try:
        tokenizer_json.encode("", schema.text.tokenizer, "a text")
    except DataProblem as error:
        raise UserError(f"{folder}: {error}") from None
