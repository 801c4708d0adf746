"""The arrays of a prepared workspace, memory-mapped."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.datasets.large_arrays import LARGE_BYTES, is_file, map_in_small_pages, release


@dataclass(frozen=True)
class Workspace:
    """Arrays of a prepared run, memory-mapped. `part(i)` gives the rows of client i.

    Attributes:
        test_rows: the held-out rows. `owners`: the client of each.
        sites: site index of each row; empty if the data has no sites.
    """

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    test_rows: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int32]
    parts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    sites: npt.NDArray[np.int32]

    def release(self) -> None:
        """Gives the memory of rows that were read back, if there are many rows; they stay in the files."""
        if self.x.nbytes >= LARGE_BYTES:
            for array in (self.x, self.y, self.parts, self.test_rows, self.owners):
                release(array)

    def part(self, index: int) -> npt.NDArray[np.int64]:
        start = int(self.ends[index - 1]) if index else 0
        return self.parts[start : int(self.ends[index])]


def open_workspace(folder: Path) -> Workspace:
    """The arrays of a prepared workspace."""

    opened = Workspace(
        *(
            load(folder / f"{name}.npy")
            for name in ("x", "y", "test_rows", "owners", "parts", "ends", "sites")
        )
    )
    if opened.x.nbytes >= LARGE_BYTES:
        map_in_small_pages(opened.x)
    return opened


def load(path: Path) -> npt.NDArray[Any]:
    """The array in a file, memory-mapped."""
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError:  # an empty array cannot be mapped
        empty: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        return empty


def save(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes an array durably. Raises: OSError: naming the file and the reason."""
    try:
        with path.open("rb" if is_file(array, path) else "wb") as file:
            if not is_file(array, path):
                np.save(file, np.ascontiguousarray(array), allow_pickle=False)
                file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # numpy's message names neither the file nor the reason
        failed = OSError(f"{path} cannot be written: {error.strerror or error}; is the disk full?")
        failed.errno = error.errno or errno.ENOSPC
        raise failed from error
