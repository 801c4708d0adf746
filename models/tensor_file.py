"""Writes and reads .safetensors files by parts; those written are byte for byte as `safetensors` writes them.

8 bytes: length of the header | header: JSON of dtype, shape and place of every tensor | the tensors, one after another
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from edge_client.files import open_regular

DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes, in the order in which tensors lie in a file."""
_READABLE = {name: dtype for dtype, name in DTYPES.items()} | {
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_NAMES = {dtype: name for name, dtype in _READABLE.items()}
_HEADER_BYTES = 100_000_000
"""Longest header, as `safetensors` has it."""
_UNLIMITED = 2**63


class Writable(Protocol):
    """A file or a hash."""

    def __call__(self, content: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def ordered(entries: Mapping[str, Entry]) -> list[str]:
    """Names in the order of their tensors in the file: larger numbers first, so that all are aligned."""
    place = {dtype: index for index, dtype in enumerate(DTYPES)}
    return sorted(entries, key=lambda name: (place[entries[name].dtype], name))


def write(
    entries: Mapping[str, Entry],
    tensors: Iterable[torch.Tensor],
    put: Writable,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Passes the file's content to `put` in pieces; returns its bytes. Holds one tensor.

    Args:
        tensors: those of `entries`, in the order of `ordered`; they are converted to its dtypes.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end, names = 0, ordered(entries)
    for name in names:
        entry = entries[name]
        start, end = end, end + entry.bytes
        header[name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    put(len(encoded).to_bytes(8, "little"))
    put(encoded)
    for name, tensor in zip(names, tensors, strict=True):
        assert tensor.shape == entries[name].shape, f"{name}: {tuple(tensor.shape)}"
        values = tensor.detach().to("cpu", entries[name].dtype).contiguous()
        if values.numel():
            put(values.view(-1).view(torch.uint8).numpy().data)
    return 8 + len(encoded) + end


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. `offset`: of its first byte in the file."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def dtype_name(self) -> str:
        """As the file has it, such as BF16."""
        return _NAMES[self.dtype]

    def read(self, box: tuple[slice, ...] = ()) -> torch.Tensor:
        """A copy of the part in `box`, slices of its first dims.

        The file is mapped read-only: its pages are the kernel's, and count as no memory of the process.

        Raises:
            OSError: it can no longer be read.
        """
        if 0 in self.shape:  # nothing to map
            return torch.empty(self.shape, dtype=self.dtype)[box]
        if not self.shape:
            content = np.fromfile(self.path, np.uint8, self.dtype.itemsize, offset=self.offset)
            return torch.from_numpy(content).view(self.dtype)[0]
        kind = np.dtype(f"u{self.dtype.itemsize}")
        part = np.memmap(self.path, kind, "r", self.offset, self.shape)[box]
        return torch.from_numpy(np.array(part)).view(self.dtype)


def read_header(path: Path, limit_bytes: int = _UNLIMITED) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors in a file by name, and its metadata. Nothing else is read.

    Raises:
        OSError: it cannot be read, is no regular file, or larger than the limit.
        ValueError: it is no .safetensors file, or damaged; names it and says how.
    """
    try:
        return _read_header(path, limit_bytes)
    except ValueError as error:
        raise ValueError(f"{path} is not a readable .safetensors file: {error}") from None


def _read_header(path: Path, limit_bytes: int) -> tuple[dict[str, Stored], dict[str, str]]:
    with open_regular(path, limit_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_BYTES):
            raise ValueError(
                f"its header would have {length:,} bytes of {size:,}; expected at most {_HEADER_BYTES:,}, and all in the file"
            )
        header = _parse(file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"__metadata__ is {str(metadata)[:100]}, expected texts by name")
    start = 8 + length
    found, places = {}, []
    for name, entry in header.items():
        stored, end = _stored(path, name, entry, start)
        found[name] = stored
        places.append((stored.offset, end, name))
    _require_contiguous(places, start, size)
    return found, metadata


def _parse(content: bytes) -> dict[str, Any]:
    try:
        header: Any = json.loads(content, object_pairs_hook=_unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"its header holds {type(header).__name__}, expected an object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header has {name!r} more than once")
    return values


def _stored(path: Path, name: str, entry: Any, start: int) -> tuple[Stored, int]:
    """The tensor of an entry whose offsets count from `start`, and where its bytes end in the file."""
    keys: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape, offsets, dtype = _sizes(keys.get("shape")), _sizes(keys.get("data_offsets")), keys.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(
            f"tensor {name!r} is {str(entry)[:200]}, expected dtype, shape and two data_offsets, whole numbers of 0 or more"
        )
    if math.prod(max(size, 1) for size in shape) >= _UNLIMITED:
        raise ValueError(
            f"tensor {name!r} has the shape {str(list(shape))[:200]}, expected less than 2^63 numbers"
        )
    if not isinstance(dtype, str) or dtype not in _READABLE:
        raise ValueError(f"tensor {name!r} has the dtype {dtype!r}, expected one of {', '.join(_READABLE)}")
    stored = Stored(path, shape, _READABLE[dtype], start + offsets[0])
    needed = Entry(shape, stored.dtype).bytes
    if offsets[1] - offsets[0] != needed:
        raise ValueError(
            f"tensor {name!r}, {dtype} {list(shape)}, has data_offsets {list(offsets)}, expected {needed:,} bytes between them"
        )
    return stored, start + offsets[1]


def _sizes(value: Any) -> tuple[int, ...] | None:
    valid = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    return tuple(value) if valid else None


def _require_contiguous(places: list[tuple[int, int, str]], start: int, size: int) -> None:
    """Refuses tensors that overlap, or bytes that are in none. `places`: first byte, end and name of each."""
    end = start
    for begins, ends, name in sorted(places):
        if begins != end:
            what = "overlaps the one before it" if begins < end else "does not follow the one before it"
            raise ValueError(f"tensor {name!r} {what}: it begins at byte {begins:,}, expected {end:,}")
        end = ends
    if end != size:
        raise ValueError(f"it has {size:,} bytes, expected {end:,} by its header; it was cut off or added to")
