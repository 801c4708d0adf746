"""Named arrays as bytes: safetensors with sorted keys and our JSON header in its metadata.

The same arrays and header always give the same bytes, so the SHA-256 of params identifies a model.
Reading has two steps, because input is untrusted: `read_header` checks names, dtypes, shapes and sizes without
building arrays; `decode` builds all arrays, `StoredArrays` one on demand, so that a payload on disk never has to be
completely in memory.

A client's result is such a payload: the arrays are `delta/<tensor>` and, for client rules that send more,
`<stream>/<tensor>`; the header holds the client's statements about its update. If the run has a code (`strategies.codes`), the one
array is `delta`, the bytes of the code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from edge_client.wire.device import TaskMessage
from edge_client.wire.strict import abbreviate, is_text, loads
from strategies.params import LazyTensors, Params, Tensors, flatten, pieces_of, shape_of
from strategies.update import Update

HEADER_LIMIT = 8 * 1024 * 1024
"""Largest safetensors header accepted, in bytes."""

LARGEST_COUNT = 2**53
"""Largest integer in a result: float64, which weighs updates, represents integers exactly up to here."""

DELTA = "delta"

_METADATA_KEY = "fedloop"
_MAX_AXES = 64  # numpy's limit; it also bounds the product of hostile extents
DTYPES = {
    name: np.dtype(stored)
    for name, stored in {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": "<u2",
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U8": "u1",
        "BOOL": "?",
    }.items()
}
"""The dtypes of safetensors, as they lie in a payload. numpy has no BF16, the upper half of a float32: it is read as float32."""


class Malformed(ValueError):
    """The bytes are not in the format of `encode`; the message says where."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as declared in the header: `dtype` as in safetensors, such as F32, and its location.

    `offset`: bytes from the beginning of the payload.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Header:
    """A payload's declarations: our JSON object and the tensors by name."""

    values: dict[str, Any]
    tensors: dict[str, TensorHeader]


class Payload(Protocol):
    """Bytes that may be on disk."""

    @property
    def size_bytes(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), fewer if the payload ends before."""


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
    """A payload in a file, which is opened for each read. Not memory-mapped: mapped pages count as used memory."""

    path: Path

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def read(self, offset: int, length: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(length)


class StoredArrays(LazyTensors):
    """The arrays of a payload, read on demand and not kept. Names are sorted."""

    def __init__(self, payload: Payload, header: Header | None = None) -> None:
        """`header`: the payload's header, if it was already read.

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
            raise Malformed(f"tensor {name!r} is empty and its shape is too large: {shape}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.header.tensors[name].shape

    def piece(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """As `LazyTensors.piece`.

        Raises:
            Malformed: the file was truncated meanwhile.
        """
        tensor = self.header.tensors[name]
        stored = DTYPES[tensor.dtype]
        size = stored.itemsize
        content = self.payload.read(tensor.offset + start * size, (stop - start) * size)
        if len(content) != (stop - start) * size:
            raise Malformed(f"the payload ends within tensor {name!r}")
        values = np.frombuffer(content, stored)
        return (values.astype("<u4") << 16).view("<f4") if tensor.dtype == "BF16" else values


def encode(arrays: Mapping[str, npt.NDArray[Any]], values: Mapping[str, Any] | None = None) -> bytes:
    """Arrays, and optionally a JSON object, as bytes."""
    # Not ascontiguousarray, which turns a scalar into a vector.
    ordered = {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}
    return safetensors.numpy.save(ordered, _metadata(values))


def write(
    path: Path,
    tensors: Tensors,
    values: Mapping[str, Any] | None = None,
    *,
    dtype: Literal["F32", "F64"] = "F32",
) -> str:
    """Writes the bytes that `encode` would return for tensors of one dtype, and returns their SHA-256.

    Copies no tensor: lazy ones are computed piece by piece, others are written directly. Therefore safetensors' own
    writer, which needs all of them in memory at once, is not used here.

    Raises:
        OSError: the disk is full or not writable; an incomplete file is left.
        ValueError: a tensor is of another dtype.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(tensors, values, dtype):
            file.write(part)
            digest.update(part)
    return digest.hexdigest()


def _parts(tensors: Tensors, values: Mapping[str, Any] | None, dtype: str) -> Iterator[bytes | memoryview]:
    names = sorted(tensors)
    head = encode_head({name: shape_of(tensors, name) for name in names}, values, dtype)
    padded = head + b" " * (-len(head) % 8)
    yield len(padded).to_bytes(8, "little") + padded
    for name in names:
        for piece in pieces_of(tensors, name):
            if piece.dtype != DTYPES[dtype]:
                raise ValueError(f"tensor {name!r} is {piece.dtype}, expected {DTYPES[dtype]}")
            yield np.ascontiguousarray(piece, DTYPES[dtype]).data


def encode_head(
    shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any] | None, dtype: str = "F32"
) -> bytes:
    """The header of tensors of one dtype. `shapes`: in sorted order."""
    head: dict[str, Any] = {}
    if values is not None:
        head["__metadata__"] = _metadata(values)
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + DTYPES[dtype].itemsize * math.prod(shape)
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    return json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()


def read_header(payload: Payload | bytes) -> Header:
    """Names, dtypes, shapes and our JSON object, checked against the payload's length. Reads only the header.

    Raises:
        Malformed: not a safetensors file, or its offsets contradict its shapes and length.
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
        tensors = {str(name): _tensor_header(name, entry, 8 + length) for name, entry in document.items()}
        data_bytes = _check_layout({name: document[name]["data_offsets"] for name in document}, tensors)
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
        Malformed: the bytes are not a safetensors file.
    """
    try:
        return safetensors.numpy.load(payload)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise Malformed(str(error)) from None


def read(path: Path) -> Params:
    """The arrays of a file, read one by one: `decode` would need the complete file in memory too.

    Raises:
        Malformed: it is not a safetensors file.
    """
    stored = StoredArrays(FilePayload(path))
    return {name: stored[name] for name in stored}


def sha256(payload: bytes) -> str:
    """Lower-case hex digest."""
    return hashlib.sha256(payload).hexdigest()


@dataclass(frozen=True)
class ResultHeader:
    """A client's statements about its update."""

    round: int
    client: str
    base: str
    num_examples: int
    num_steps: int
    train_loss: float


def encode_result(task: TaskMessage, update: Update) -> bytes:
    """The update as the bytes a client uploads."""
    if update.encoded is not None:
        return encode({DELTA: np.frombuffer(update.encoded, np.uint8)}, asdict(header_of(task, update)))
    return encode(flatten({DELTA: update.delta, **update.extras}), asdict(header_of(task, update)))


def write_result(path: Path, task: TaskMessage, update: Update) -> str:
    """Writes the bytes of `encode_result` to a file, and returns their SHA-256. Tensors on disk are never loaded completely.

    Raises:
        OSError: the disk is full or not writable.
    """
    if update.encoded is not None:
        content = encode_result(task, update)
        path.write_bytes(content)
        return sha256(content)
    return write(path, flatten({DELTA: update.delta, **update.extras}), asdict(header_of(task, update)))


def describe(tensors: Tensors) -> dict[str, TensorHeader]:
    """The headers that tensors in memory would have in a payload; their offsets are left at 0.

    Raises:
        Malformed: a dtype has no name in safetensors.
    """
    names = {stored: name for name, stored in DTYPES.items() if name != "BF16"}
    for name, value in tensors.items():
        if value.dtype not in names:
            raise Malformed(f"tensor {name!r} is {value.dtype}, which cannot be sent")
    return {name: TensorHeader(names[value.dtype], value.shape) for name, value in tensors.items()}


def header_of(task: TaskMessage, update: Update) -> ResultHeader:
    """What the client of this task says of its update."""

    return ResultHeader(
        task.round, task.client, task.base, update.num_examples, update.num_steps, update.train_loss
    )


def result_header(values: Mapping[str, Any]) -> ResultHeader:
    """The header of a result from its JSON object.

    Raises:
        Malformed: a key is missing, of another type, or too large for exact arithmetic.
    """
    kinds = {
        "round": int,
        "client": str,
        "base": str,
        "num_examples": int,
        "num_steps": int,
        "train_loss": float,
    }
    for key, kind in kinds.items():
        value = values.get(key)
        number = kind is float and isinstance(value, int)
        if isinstance(value, bool) or not (isinstance(value, kind) or number):
            raise Malformed(f"result header: {key} is {abbreviate(value)}, expected {kind.__name__}")
        if isinstance(value, str) and not is_text(value):
            raise Malformed(f"result header: {key} is {abbreviate(value)}, which is not valid text")
        if isinstance(value, int) and abs(value) > LARGEST_COUNT:
            raise Malformed(f"result header: {key} is {abbreviate(value)}, expected at most {LARGEST_COUNT}")
    return ResultHeader(**{key: kind(values[key]) for key, kind in kinds.items()})


def _metadata(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    return {_METADATA_KEY: json.dumps(values, sort_keys=True)} if values is not None else None


def _tensor_header(name: str, entry: Any, data: int) -> TensorHeader:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has unknown dtype {abbreviate(dtype)}")
    if len(shape) > _MAX_AXES or not all(_is_extent(extent) for extent in shape):
        raise ValueError(f"tensor {name!r} has shape {abbreviate(shape)}")
    start, _ = entry["data_offsets"]
    if not _is_extent(start):
        raise ValueError(f"tensor {name!r} lies at {abbreviate(start)}")
    return TensorHeader(dtype, shape, data + start)


def _is_extent(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_layout(offsets: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> int:
    """Total bytes of all tensors. Raises ValueError if they are not contiguous, with gaps or overlaps."""
    end = 0
    for name, (start, stop) in sorted(offsets.items(), key=lambda item: tuple(item[1])):
        size = DTYPES[tensors[name].dtype].itemsize * math.prod(tensors[name].shape)
        if (start, stop) != (end, end + size):
            raise ValueError(f"tensor {name!r} lies at {[start, stop]}, expected {[end, end + size]}")
        end = stop
    return end
