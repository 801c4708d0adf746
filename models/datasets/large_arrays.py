"""Arrays that need not fit in memory: files, mapped into memory and gone through piece by piece.

Mapped pages count as memory of the process that has touched them until they are released; their content stays in the file.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LARGE_BYTES = 2**28
"""Arrays from this size on are files where a folder is given."""
_PIECE_BYTES = 2**24
_SLAB_BYTES, _WINDOW_BYTES = 2**26, 2**24


def new_array(shape: tuple[int, ...], dtype: npt.DTypeLike, file: Path | None) -> npt.NDArray[Any]:
    """An array to fill: in memory, or in `file` (.npy) if it is large."""
    size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
    if file is None or size < LARGE_BYTES:
        return np.empty(shape, dtype)
    made = np.lib.format.open_memmap(file, mode="w+", dtype=np.dtype(dtype), shape=shape)
    map_in_small_pages(made)
    return made


def pieces(array: npt.NDArray[Any]) -> Iterator[slice]:
    """Slices of rows that together are all of them; of a large file the pages of a slice are released after it."""
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    rows = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, len(array), rows):
        yield slice(start, min(start + rows, len(array)))
        if array.nbytes >= LARGE_BYTES:
            release(array)


def gather(array: npt.NDArray[Any], rows: npt.NDArray[np.int64], file: Path | None) -> npt.NDArray[Any]:
    """The rows of an array in this order, in `file` if they are large. Little of either is in memory at a time."""
    gathered = new_array((len(rows), *array.shape[1:]), array.dtype, file)
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    slab, window = (max(1, size // row_bytes) for size in (_SLAB_BYTES, _WINDOW_BYTES))
    for start in range(0, len(rows), slab):
        wanted = rows[start : start + slab]
        order = np.argsort(wanted, kind="stable")
        edges = np.searchsorted(wanted[order], np.arange(0, len(array) + window, window))
        found = np.empty((len(wanted), *array.shape[1:]), array.dtype)
        for first, last in itertools.pairwise(edges.tolist()):
            chosen = order[first:last]
            found[chosen] = array[wanted[chosen]]
            release(array)
        gathered[start : start + slab] = found
        release(gathered)
    return gathered


def release(array: npt.NDArray[Any]) -> None:
    """Gives the pages of a mapped file back; of an array in memory nothing happens."""
    _advise(array, mmap.MADV_DONTNEED)


def map_in_small_pages(array: npt.NDArray[Any]) -> None:
    """A row that is read from a mapped file then takes some kilobytes of memory, not two megabytes."""
    with suppress(OSError):  # a kernel without huge pages
        _advise(array, mmap.MADV_NOHUGEPAGE)


def _advise(array: npt.NDArray[Any], advice: int) -> None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(advice)


def is_file(array: npt.NDArray[Any], file: Path) -> bool:
    """Whether the array is what this file holds."""
    return isinstance(array, np.memmap) and array.filename is not None and Path(array.filename) == file
