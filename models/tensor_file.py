"""Writes and reads .safetensors files by parts; those written are byte for byte as `safetensors` writes them.

8 bytes: length of the header | header: JSON of dtype, shape and place of every tensor | the tensors, one after another
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

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
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


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

    def read(self, box: tuple[slice, ...]) -> torch.Tensor:
        """A copy of the part in `box`, a slice for every dim.

        The file is mapped read-only: its pages are the kernel's, and count as no memory of the process.
        """
        if not self.shape:
            content = np.fromfile(self.path, np.uint8, self.dtype.itemsize, offset=self.offset)
            return torch.from_numpy(content).view(self.dtype)[0]
        kind = np.dtype(f"u{self.dtype.itemsize}")
        part = np.memmap(self.path, kind, "r", self.offset, self.shape)[box]
        return torch.from_numpy(np.array(part)).view(self.dtype)


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors in a file by name, and its metadata.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no .safetensors file, or incomplete.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is not a .safetensors file, or not all of it")
        header: dict[str, Any] = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        stored = Stored(path, tuple(entry["shape"]), _DTYPES[entry["dtype"]], 8 + length + start)
        if end - start != Entry(stored.shape, stored.dtype).bytes or 8 + length + end > size:
            raise ValueError(f"{path}: tensor {name!r} is not all there")
        found[name] = stored
    return found, metadata
