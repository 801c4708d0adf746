"""Writes .safetensors files one tensor at a time, byte for byte as `safetensors` writes them.

8 bytes: length of the header | header: JSON of dtype, shape and place of every tensor | the tensors, one after another
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


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
    return sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))


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
