"""Files of a version before its registration, and safe reads of them: JSON, headers of safetensors, file signatures.

Nothing here builds an array or executes a file's content; a pickle file is refused before it is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.releases.roles import TARGET_LIMIT_BYTES
from edge_client.files import is_beneath, open_beneath, open_regular
from edge_client.wire import arrays
from edge_client.wire.arrays import FilePayload, Header
from edge_client.wire.strict import InvalidDocument, loads

LIMIT_BYTES = TARGET_LIMIT_BYTES
"""Largest file of a version."""
_PNG = b"\x89PNG\r\n\x1a\n"
DOCUMENT_LIMIT_BYTES = 16 * 2**20
"""Largest JSON document of a version that is read."""


@dataclass(frozen=True)
class Content:
    """A file: the current place of its bytes, their hash and their number."""

    place: Path
    sha256: str
    size_bytes: int


Contents = Mapping[str, Content]
"""Path within the version -> the file."""


def content_of(place: Path, folder: Path | None = None) -> Content:
    """The file at `place`. `folder`: one from elsewhere, whose links must not lead out of it.

    Raises:
        UserError: it cannot be read, is not a regular file, is too large, or lies outside `folder`.
    """
    try:
        if folder is not None and not is_beneath(place, [folder]):
            raise UserError(
                f"{place}: is a link that leads out of {folder}; copy the folder with the files themselves "
                f"(cp -rL {folder} COPY) and take that"
            )
        with (
            open_regular(place, LIMIT_BYTES)
            if folder is None
            else open_beneath(place, [folder], LIMIT_BYTES) as file
        ):
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Content(place, digest, file.tell())
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}") from None


def identity(kind: str, contents: Contents) -> str:
    """SHA-256 over kind, paths and hashes: versions with the same identity have identical files."""
    parts = [kind, sorted((path, content.sha256) for path, content in contents.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def document(contents: Contents, path: str) -> dict[str, Any]:
    """The JSON object in a file of the version.

    Raises:
        UserError: `missing_file`, or `bad_document`: too large, not JSON, not an object.
    """
    content = _require(contents, path)
    if content.size_bytes > DOCUMENT_LIMIT_BYTES:
        raise UserError(
            f"{path} has {content.size_bytes} bytes, expected at most {DOCUMENT_LIMIT_BYTES}", "bad_document"
        )
    try:
        value = loads(content.place.read_bytes(), path)
    except InvalidDocument as error:
        raise UserError(str(error), "bad_document") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, expected an object", "bad_document")
    return value


def tensors(contents: Contents, path: str) -> Header:
    """Names, kinds and shapes of the tensors in a safetensors file; only its header is read.

    Raises:
        UserError: `missing_file`, or `bad_file`: it is not a safetensors file.
    """
    content = _require(contents, path)
    try:
        return arrays.read_header(FilePayload(content.place))
    except arrays.Malformed as error:
        raise UserError(f"{path} is not a safetensors file: {error}", "bad_file") from None


def require_tflite(contents: Contents, path: str) -> None:
    """Requires the signature of a `.tflite` flatbuffer. The self-test checks what the model does.

    Raises:
        UserError: `missing_file` or `bad_file`.
    """
    content = _require(contents, path)
    with content.place.open("rb") as file:
        if file.read(8)[4:] != b"TFL3":
            raise UserError(f"{path} is not a .tflite file: the signature TFL3 is missing", "bad_file")


def require_matching_suffix(contents: Contents, path: str) -> None:
    """Requires that a document or picture has the format of its suffix: JSON, TOML, text or PNG.

    Raises:
        UserError: `bad_document`, `bad_file`.
    """
    place, suffix = contents[path].place, Path(path).suffix
    if suffix == ".json":
        document(contents, path)
        return
    if suffix == ".png":
        with place.open("rb") as file:
            if file.read(len(_PNG)) != _PNG:
                raise UserError(f"{path} is not a PNG file", "bad_file")
        return
    if contents[path].size_bytes > DOCUMENT_LIMIT_BYTES:
        raise UserError(
            f"{path} has {contents[path].size_bytes} bytes, expected at most {DOCUMENT_LIMIT_BYTES}",
            "bad_file",
        )
    try:
        text = place.read_bytes().decode("utf-8")
        if suffix == ".toml":
            tomllib.loads(text)
    except ValueError:
        raise UserError(
            f"{path} is not {'TOML' if suffix == '.toml' else 'text in UTF-8'}", "bad_file"
        ) from None


def about_tensors(headers: Mapping[str, Header]) -> dict[str, Any]:
    """Number of tensors, total number of their values, and their dtypes."""
    slots = [slot for header in headers.values() for slot in header.tensors.values()]
    return {
        "tensors": len(slots),
        "parameters": sum(math.prod(slot.shape) for slot in slots),
        "dtypes": sorted({slot.dtype for slot in slots}),
    }


def figures(document: Mapping[str, Any], *keys: str) -> dict[str, float]:
    """The finite numbers of a document, under these keys or all of them."""
    numbers: dict[str, float] = {}
    for key in keys or document:
        value = document.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value):
            numbers[key] = value
    return numbers


def _require(contents: Contents, path: str) -> Content:
    if path not in contents:
        raise UserError(f"{path} is missing", "missing_file")
    return contents[path]


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
