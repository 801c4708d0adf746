"""The files of a checkpoint: each process writes the parts of tensors that it has, and reads the parts that it needs.

    rank-00002.safetensors   parts by the tensors' names; metadata `parts`: {name: [offset of each dim, shape of the whole]}

A part that several processes have is written by one of them. Nothing is copied but into the page cache: a write holds
one part, a read one overlap of a stored part with a needed one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from models import tensor_file
from models.pretrain.dtensor import Box, box_of, local_tensor
from models.tensor_file import Entry

SUFFIX = ".safetensors"
_PARTS = "parts"
_DTYPES = {name: dtype for dtype, name in tensor_file.DTYPES.items()}

Part = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name of a tensor, and offset and shape of a part of it."""


@dataclass(frozen=True)
class Stored:
    """A tensor in the files of a checkpoint.

    Attributes:
        shape: of the whole tensor.
        parts: file, offset and shape of each part; they do not overlap.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[Path, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)


def parts_of(tensors: Mapping[str, torch.Tensor]) -> list[Part]:
    """What this process has of `tensors`, without empty parts."""
    found = []
    for name, tensor in tensors.items():
        box = box_of(tensor)
        shape = tuple(each.stop - each.start for each in box)
        if 0 not in shape:
            found.append((name, tuple(each.start for each in box), shape))
    return found


def assign(parts: Sequence[Sequence[Part]]) -> list[list[str]]:
    """The names of the parts that each process writes, given those that each has: all once, as evenly as possible."""
    owners: dict[Part, list[int]] = defaultdict(list)
    for rank, mine in enumerate(parts):
        for part in mine:
            owners[part].append(rank)
    load = [0] * len(parts)
    names: list[list[str]] = [[] for _ in parts]
    for part in sorted(owners, key=lambda part: (len(owners[part]), part)):
        rank = min(owners[part], key=lambda rank: (load[rank], rank))
        load[rank] += math.prod(part[2])
        names[rank].append(part[0])
    return names


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> BufferedRandom:
    """Writes what this process has of `tensors` to `path`; returns the open file, for `make_durable`.

    Raises:
        OSError: it cannot be written.
    """
    local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
    entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in local.items()}
    parts = {
        name: [[each.start for each in box_of(tensor)], list(tensor.shape)]
        for name, tensor in tensors.items()
    }
    file = path.open("w+b")
    try:
        names = tensor_file.ordered(entries)
        tensor_file.write(entries, (local[name] for name in names), file.write, {_PARTS: json.dumps(parts)})
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def make_durable(file: BufferedRandom) -> str:
    """Waits until a written file is on the disk, and closes it; returns its SHA-256.

    Raises:
        OSError: it cannot be written.
    """
    with file:
        os.fsync(file.fileno())
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def stored_in(folder: Path) -> dict[str, Stored]:
    """The tensors in the files of a checkpoint; reads their headers.

    Raises:
        OSError, SafetensorError, ValueError, KeyError: a file cannot be read.
    """
    found: dict[str, Stored] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with safe_open(path, "pt") as file:
            for name, (offset, shape) in json.loads((file.metadata() or {})[_PARTS]).items():
                part = file.get_slice(name)
                stored = found.setdefault(name, Stored(tuple(shape), _DTYPES[part.get_dtype()]))
                stored.parts.append((path, tuple(offset), tuple(part.get_shape())))
    return found


def read(stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills what this process has of `tensors` with the stored values.

    Raises:
        OSError, SafetensorError: a file cannot be read.
        ValueError: a tensor has another shape, or is not stored, or not all of it; names it.
    """
    if missing := sorted(tensors.keys() - stored.keys()):
        raise ValueError(f"it has no tensor {missing[0]!r}")
    with ExitStack() as stack, torch.no_grad():
        files: dict[Path, Any] = {}
        for name, tensor in tensors.items():
            if stored[name].shape != tuple(tensor.shape):
                raise ValueError(f"tensor {name!r} is {stored[name].shape}, expected {tuple(tensor.shape)}")
            box, local = box_of(tensor), local_tensor(tensor)
            absent = local.numel()
            for path, offset, shape in stored[name].parts:
                theirs = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
                overlap = _overlap(box, theirs)
                if overlap is None:
                    continue
                if path not in files:
                    files[path] = stack.enter_context(safe_open(path, "pt"))
                here = local[_within(overlap, box)]
                there = _within(overlap, theirs)
                here.copy_(files[path].get_slice(name)[there] if there else files[path].get_tensor(name))
                absent -= here.numel()
            if absent:
                raise ValueError(f"{absent} numbers of tensor {name!r} are in none of its files")


def whole(stored: Mapping[str, Stored], name: str) -> torch.Tensor:
    """A whole tensor. Raises: as `read`."""
    if name not in stored:
        raise ValueError(f"it has no tensor {name!r}")
    tensor = torch.empty(stored[name].shape, dtype=stored[name].dtype)
    read(stored, {name: tensor})
    return tensor


def _overlap(one: Box, other: Box) -> Box | None:
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(each.start >= each.stop for each in both) else both


def _within(part: Box, whole: Box) -> Box:
    """`part`, counted from the start of `whole`."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, whole, strict=True))
