"""Named arrays as bytes: safetensors, keys sorted, with one JSON header of ours in its metadata.

The same arrays and header always give the same bytes, so the SHA-256 of params identifies a model.
Reading is in two steps, because what comes from outside is not trusted: `read_header` looks at names,
dtypes, shapes and sizes without building anything, `decode` builds arrays of a header that was accepted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from edge_client.wire.strict import shown
from strategies.params import Params

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


class Malformed(ValueError):
    """The bytes are not what `encode` makes; the message says where it broke."""


@dataclass(frozen=True)
class Slot:
    """One tensor as its header declares it; `dtype` in safetensors' spelling, such as F32."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """What a payload declares: our JSON object and the tensors by name."""

    values: dict[str, Any]
    tensors: dict[str, Slot]


def encode(arrays: Mapping[str, npt.NDArray[Any]], values: Mapping[str, Any] | None = None) -> bytes:
    """Arrays, and optionally a JSON object, as bytes."""
    metadata = {_METADATA_KEY: json.dumps(values, sort_keys=True)} if values is not None else None
    # Not ascontiguousarray, which makes a scalar a vector.
    ordered = {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}
    return safetensors.numpy.save(ordered, metadata)


def read_header(payload: bytes) -> Header:
    """Names, dtypes, shapes and our JSON object, checked against the payload's length.

    Raises:
        Malformed: not a safetensors file, or its offsets do not fit its shapes and length.
    """
    if len(payload) < 8:
        raise Malformed(f"{len(payload)} bytes are too short for a header")
    length = int.from_bytes(payload[:8], "little")
    if length > min(HEADER_LIMIT, len(payload) - 8):
        raise Malformed(f"header of {length} bytes does not fit the payload of {len(payload)}")
    try:
        document = json.loads(payload[8 : 8 + length])
        metadata = document.pop("__metadata__", {})
        values = json.loads(metadata[_METADATA_KEY]) if _METADATA_KEY in metadata else {}
        tensors = {str(name): _slot(name, entry) for name, entry in document.items()}
        data_bytes = _tiled({name: document[name]["data_offsets"] for name in document}, tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Malformed(f"header is not a safetensors header: {error}") from None
    if not isinstance(values, dict):
        raise Malformed("header values are not a JSON object")
    if data_bytes != len(payload) - 8 - length:
        raise Malformed(f"tensors declare {data_bytes} bytes, the payload holds {len(payload) - 8 - length}")
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


def sha256(payload: bytes) -> str:
    """Lower-case hex digest."""
    return hashlib.sha256(payload).hexdigest()


def _slot(name: str, entry: Any) -> Slot:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has unknown dtype {shown(dtype)}")
    if len(shape) > _MOST_AXES or not all(_is_extent(extent) for extent in shape):
        raise ValueError(f"tensor {name!r} has shape {shown(shape)}")
    return Slot(dtype, shape)


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
