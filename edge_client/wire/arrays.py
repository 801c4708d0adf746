"""Named arrays as bytes: safetensors, keys sorted, with one JSON header of ours in its metadata.

The same arrays and header always give the same bytes, so the SHA-256 of params identifies a model.
Reading is in two steps, because what comes from outside is not trusted: `read_header` looks at names,
dtypes, shapes and sizes without building anything; `decode` builds all arrays, `StoredArrays` one when it is
asked for, so that a payload on disk never has to be in memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from edge_client.wire.strict import loads, shown
from strategies.lazy import LazyTensors, pieces_of, shape_of
from strategies.params import Params, Tensors

HEADER_LIMIT = 8 * 1024 * 1024
"""Largest safetensors header read, in bytes."""

_METADATA_KEY = "fedloop"
_MOST_AXES = 64  # numpy's limit; it also keeps the product of hostile extents cheap
_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


class Malformed(ValueError):
    """The bytes are not what `encode` makes; the message says where it broke."""


@dataclass(frozen=True)
class Slot:
    """One tensor as its header declares it: `dtype` in safetensors' spelling, such as F32, and where it lies.

    `offset` is in bytes from the beginning of the payload.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Header:
    """What a payload declares: our JSON object and the tensors by name."""

    values: dict[str, Any]
    tensors: dict[str, Slot]


class Payload(Protocol):
    """Bytes that may lie on disk."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), fewer where the payload ends before."""


@dataclass(frozen=True)
class BytesPayload:
    """A payload in memory."""

    content: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def read(self, offset: int, length: int) -> bytes:
        return self.content[offset : offset + length]


@dataclass(frozen=True)
class FilePayload:
    """A payload in a file, which is opened for each read. Nothing is mapped: mapped pages count as memory in use."""

    path: Path

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def read(self, offset: int, length: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(length)


class StoredArrays(LazyTensors):
    """The arrays of a payload, read when they are asked for and not kept. Names are sorted."""

    def __init__(self, payload: Payload, header: Header | None = None) -> None:
        """`header` is the payload's own, where it was read already.

        Raises:
            Malformed: as `read_header`.
        """
        self.payload = payload
        self.header = header or read_header(payload)
        self._names = sorted(self.header.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        shape = self.shape(name)
        values = self.piece(name, 0, math.prod(shape))
        try:
            return values.reshape(shape)
        except ValueError:
            raise Malformed(f"tensor {name!r} has no values and a shape beyond any memory: {shape}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.header.tensors[name].shape

    def piece(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """As `LazyTensors.piece`.

        Raises:
            Malformed: of a kind that numpy does not have, or the file was cut meanwhile.
        """
        slot = self.header.tensors[name]
        if slot.dtype not in _NUMPY:
            raise Malformed(f"tensor {name!r} is {slot.dtype}, which is not read here")
        size = _ITEM_BYTES[slot.dtype]
        content = self.payload.read(slot.offset + start * size, (stop - start) * size)
        if len(content) != (stop - start) * size:
            raise Malformed(f"the payload ends within tensor {name!r}")
        return np.frombuffer(content, _NUMPY[slot.dtype])


def encode(arrays: Mapping[str, npt.NDArray[Any]], values: Mapping[str, Any] | None = None) -> bytes:
    """Arrays, and optionally a JSON object, as bytes."""
    # Not ascontiguousarray, which makes a scalar a vector.
    ordered = {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}
    return safetensors.numpy.save(ordered, _metadata(values))


def write(path: Path, tensors: Tensors, values: Mapping[str, Any] | None = None) -> str:
    """Writes the bytes that `encode` would make of float32 tensors, and returns their SHA-256.

    Holds no tensor: lazy ones are computed piece by piece, others are written from where they lie. That is why
    safetensors' own writer, which wants all of them in memory at once, is not used here.

    Raises:
        OSError: the disk is full or not writable; the file is left as far as it came.
        ValueError: a tensor is not float32.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(tensors, values):
            file.write(part)
            digest.update(part)
    return digest.hexdigest()


def _parts(tensors: Tensors, values: Mapping[str, Any] | None) -> Iterator[bytes | memoryview]:
    names = sorted(tensors)
    head: dict[str, Any] = {}
    if values is not None:
        head["__metadata__"] = _metadata(values)
    end = 0
    for name in names:
        shape = shape_of(tensors, name)
        start, end = end, end + 4 * math.prod(shape)
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    padded = text + b" " * (-len(text) % 8)
    yield len(padded).to_bytes(8, "little") + padded
    for name in names:
        for piece in pieces_of(tensors, name):
            if piece.dtype != np.float32:
                raise ValueError(f"tensor {name!r} is {piece.dtype}, expected float32")
            yield np.ascontiguousarray(piece, "<f4").data


def read_header(payload: Payload | bytes) -> Header:
    """Names, dtypes, shapes and our JSON object, checked against the payload's length. Reads only the header.

    Raises:
        Malformed: not a safetensors file, or its offsets do not fit its shapes and length.
    """
    if isinstance(payload, bytes):
        payload = BytesPayload(payload)
    size = payload.size_bytes
    if size < 8:
        raise Malformed(f"{size} bytes are too short for a header")
    length = int.from_bytes(payload.read(0, 8), "little")
    if length > min(HEADER_LIMIT, size - 8):
        raise Malformed(f"header of {length} bytes does not fit the payload of {size}")
    try:
        document: Any = loads(payload.read(8, length), "header")
        metadata = document.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata that is not text")
        values = loads(metadata[_METADATA_KEY].encode(), "metadata") if _METADATA_KEY in metadata else {}
        tensors = {str(name): _slot(name, entry, 8 + length) for name, entry in document.items()}
        data_bytes = _tiled({name: document[name]["data_offsets"] for name in document}, tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Malformed(f"header is not a safetensors header: {error}") from None
    if not isinstance(values, dict):
        raise Malformed("header values are not a JSON object")
    if data_bytes != size - 8 - length:
        raise Malformed(f"tensors declare {data_bytes} bytes, the payload holds {size - 8 - length}")
    return Header(values, tensors)


def decode(payload: bytes) -> Params:
    """The arrays, copied out of `payload`.

    Raises:
        Malformed: the bytes are no safetensors file.
    """
    try:
        return safetensors.numpy.load(payload)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise Malformed(str(error)) from None


def read(path: Path) -> Params:
    """The arrays of a file in memory, once: read one by one, where `decode` needs the whole file beside them.

    Raises:
        Malformed: it is no safetensors file.
    """
    stored = StoredArrays(FilePayload(path))
    return {name: stored[name] for name in stored}


def sha256(payload: bytes) -> str:
    """Lower-case hex digest."""
    return hashlib.sha256(payload).hexdigest()


def sha256_of(path: Path) -> str:
    """Lower-case hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _metadata(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    return {_METADATA_KEY: json.dumps(values, sort_keys=True)} if values is not None else None


def _slot(name: str, entry: Any, data: int) -> Slot:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has unknown dtype {shown(dtype)}")
    if len(shape) > _MOST_AXES or not all(_is_extent(extent) for extent in shape):
        raise ValueError(f"tensor {name!r} has shape {shown(shape)}")
    start, _ = entry["data_offsets"]
    if not _is_extent(start):
        raise ValueError(f"tensor {name!r} lies at {shown(start)}")
    return Slot(dtype, shape, data + start)


def _is_extent(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _tiled(offsets: Mapping[str, Any], tensors: Mapping[str, Slot]) -> int:
    """Bytes of all tensors together, which must lie one after the other without gap or overlap."""
    end = 0
    for name, (start, stop) in sorted(offsets.items(), key=lambda item: tuple(item[1])):
        size = _ITEM_BYTES[tensors[name].dtype] * math.prod(tensors[name].shape)
        if (start, stop) != (end, end + size):
            raise ValueError(f"tensor {name!r} lies at {[start, stop]}, expected {[end, end + size]}")
        end = stop
    return end
