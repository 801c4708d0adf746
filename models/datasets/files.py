"""Finding the files a data set lies in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from models.datasets.dataset import DataError


def find(data_dir: Path | None, names: Sequence[str], dataset: str, origin: str) -> Path:
    """The first of `names` that exists in `data_dir` (the current folder when None).

    Raises:
        DataError: none does; says where they were looked for, where to get them and what to set.
    """
    folder = data_dir or Path.cwd()
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise missing(folder, names, dataset, origin)


def missing(folder: Path, names: Sequence[str], dataset: str, origin: str) -> DataError:
    """The error for files that are not there."""
    wanted = f"{names[0]} is not" if len(names) == 1 else f"none of {', '.join(names)} is"
    absent = "" if folder.is_dir() else " (there is no such folder)"
    return DataError(
        f"data set {dataset!r}: {wanted} in {folder.absolute()}{absent}; get it from {origin} "
        "and name its folder with --data-dir or FEDLOOP_DATA_DIR"
    )
