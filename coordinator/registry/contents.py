"""Files of a version before it is registered, and what may be read of them: JSON, headers of safetensors, marks of files.

Nothing here builds an array or runs what a file says; a file of pickles is refused before it is opened.
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
from edge_client.wire.strict import Unfit, loads

LIMIT_BYTES = TARGET_LIMIT_BYTES
"""Largest file of a version."""
_PNG = b"\x89PNG\r\n\x1a\n"
DOCUMENT_LIMIT_BYTES = 16 * 2**20
"""Largest JSON document of a version that is read."""


@dataclass(frozen=True)
class Content:
    """A file: where its bytes lie now, and their hash and number."""

    place: Path
    sha256: str
    size_bytes: int


Contents = Mapping[str, Content]
"""Path within the version -> the file."""


def content_of(place: Path, folder: Path | None = None) -> Content:
    """The file at `place`; `folder`: from elsewhere, whose links must not lead out of it.

    Raises:
        UserError: it cannot be read, is no regular file, is too large, or lies outside of `folder`.
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
    """SHA-256 over kind, paths and hashes: versions with the same identity have the very same files."""
    told = [kind, sorted((path, content.sha256) for path, content in contents.items())]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def document(contents: Contents, path: str) -> dict[str, Any]:
    """The JSON object in a file of the version.

    Raises:
        UserError: `missing_file`, or `bad_document`: too large, not JSON, not an object.
    """
    content = contents.get(path)
    if content is None:
        raise UserError(f"{path} is missing", "missing_file")
    if content.size_bytes > DOCUMENT_LIMIT_BYTES:
        raise UserError(
            f"{path} has {content.size_bytes} bytes, expected at most {DOCUMENT_LIMIT_BYTES}", "bad_document"
        )
    try:
        found = loads(content.place.read_bytes(), path)
    except Unfit as error:
        raise UserError(str(error), "bad_document") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds {type(found).__name__}, expected an object", "bad_document")
    return found


def tensors(contents: Contents, path: str) -> Header:
    """Names, kinds and shapes of the tensors in a safetensors file; only its header is read.

    Raises:
        UserError: `missing_file`, or `bad_file`: it is no safetensors file.
    """
    content = contents.get(path)
    if content is None:
        raise UserError(f"{path} is missing", "missing_file")
    try:
        return arrays.read_header(FilePayload(content.place))
    except arrays.Malformed as error:
        raise UserError(f"{path} is not a safetensors file: {error}", "bad_file") from None


def require_tflite(contents: Contents, path: str) -> None:
    """Lets a file pass that bears the mark of a `.tflite` flatbuffer. What it does is for its self-test to find out.

    Raises:
        UserError: `missing_file` or `bad_file`.
    """
    content = contents.get(path)
    if content is None:
        raise UserError(f"{path} is missing", "missing_file")
    with content.place.open("rb") as file:
        if file.read(8)[4:] != b"TFL3":
            raise UserError(f"{path} is not a .tflite file: the mark TFL3 is missing", "bad_file")


def require_told(contents: Contents, path: str) -> None:
    """Lets a document or picture pass that is what its name says: JSON, TOML, text or PNG.

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
    """Number of tensors, of values in them, and their kinds."""
    slots = [slot for header in headers.values() for slot in header.tensors.values()]
    return {
        "tensors": len(slots),
        "parameters": sum(math.prod(slot.shape) for slot in slots),
        "dtypes": sorted({slot.dtype for slot in slots}),
    }


def figures(document: Mapping[str, Any], *keys: str) -> dict[str, float]:
    """The finite numbers of a document, those of these keys or all of them."""
    found: dict[str, float] = {}
    for key in keys or document:
        value = document.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value):
            found[key] = value
    return found


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
