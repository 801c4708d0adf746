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
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path

import torch

from models import tensor_file
from models.pretrain.dtensor import Box, box_of, local_tensor
from models.tensor_file import Entry

SUFFIX = ".safetensors"
_PARTS = "parts"

Part = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name of a tensor, and offset and shape of a part of it."""


@dataclass(frozen=True)
class Stored:
    """A tensor in the files of a checkpoint.

    Attributes:
        shape: of the whole tensor.
        parts: offset of each part, and where it is; they do not overlap.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[tuple[int, ...], tensor_file.Stored]] = field(default_factory=list)


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
        OSError: a file cannot be read.
        ValueError, KeyError, TypeError: it is not as `write` writes it.
    """
    found: dict[str, Stored] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        parts, metadata = tensor_file.read_header(path)
        for name, (offset, shape) in json.loads(metadata[_PARTS]).items():
            stored = found.setdefault(name, Stored(tuple(shape), parts[name].dtype))
            stored.parts.append((tuple(offset), parts[name]))
    return found


def read(stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills what this process has of `tensors` with the stored values.

    Raises:
        OSError: a file cannot be read.
        ValueError: a tensor has another shape, or is not stored, or not all of it; names it.
    """
    if missing := sorted(tensors.keys() - stored.keys()):
        raise ValueError(f"it has no tensor {missing[0]!r}")
    for name, tensor in tensors.items():
        if stored[name].shape != tuple(tensor.shape):
            raise ValueError(f"tensor {name!r} is {stored[name].shape}, expected {tuple(tensor.shape)}")
        box, local = box_of(tensor), local_tensor(tensor).detach()
        absent = local.numel()
        for offset, part in stored[name].parts:
            theirs = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
            overlap = _overlap(box, theirs)
            if overlap is not None:
                here = local[_within(overlap, box)]
                here.copy_(part.read(_within(overlap, theirs)))
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
