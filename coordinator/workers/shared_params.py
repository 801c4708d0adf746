"""Params in anonymous shared memory: written once, mapped read-only by each worker. A few are sent as they are, which takes less time.

The memory has no name: it is gone with the last process that has it open, also if all are killed. Its size is sealed, so that no
reader can lose a part of its mapping.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_client.wire import arrays
from strategies.params import LazyTensors, Params, Tensors

_SMALL_BYTES = 16_384
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True)
class Published:
    """Params that all workers have. `sha256`, `size_bytes`: of their encoded bytes."""

    params: Tensors
    sha256: str
    size_bytes: int


def are_small(params: Tensors) -> bool:
    """Whether params are in memory and so few that a worker had better get a copy of its own."""
    if isinstance(params, LazyTensors):
        return False
    return sum(value.nbytes for value in params.values()) <= _SMALL_BYTES


def write(params: Tensors) -> tuple[int, Published]:
    """A descriptor of memory that holds the encoded params; the caller closes it. Copies no tensor."""
    descriptor = os.memfd_create("params", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        digest = arrays.write(Path(f"/proc/self/fd/{descriptor}"), params)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, Published(params, digest, os.fstat(descriptor).st_size)
    except BaseException:
        os.close(descriptor)
        raise


@dataclass(frozen=True)
class _MappedPayload:
    content: mmap.mmap

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def read(self, offset: int, length: int) -> bytes:
        return self.content[offset : offset + length]


def read(descriptor: int) -> Params:
    """The params that `write` has written, mapped, read-only; they last as long as they are used."""
    content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    params: Params = {}
    for name, each in arrays.read_header(_MappedPayload(content)).tensors.items():
        values = (
            np.frombuffer(content, "<f4", offset=each.offset) if 0 not in each.shape else np.zeros(0, "<f4")
        )
        params[name] = values[: math.prod(each.shape)].reshape(each.shape)
    return dict(sorted(params.items()))
