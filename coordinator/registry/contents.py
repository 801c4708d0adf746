"""Files of a version before it is registered, and what may be read of them: JSON, headers of safetensors, marks of files.

Nothing here builds an array or runs what a file says; a file of pickles is refused before it is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from edge_client.wire import arrays
from edge_client.wire.arrays import FilePayload, Header
from edge_client.wire.strict import Unfit, loads

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


def content_of(place: Path) -> Content:
    """The file at `place`. Raises: UserError: it cannot be read."""
    try:
        return Content(place, arrays.sha256_of(place), place.stat().st_size)
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
