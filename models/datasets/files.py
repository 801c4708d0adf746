"""Finding the files of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from models.datasets.dataset import DataError


def find(data_dir: Path | None, names: Sequence[str], dataset: str, origin: str) -> Path:
    """The first of `names` that exists in `data_dir` (the current folder when None).

    Raises:
        DataError: none does; names the folder, where to get them and what to set.
    """
    folder = data_dir or Path.cwd()
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise missing(folder, names, dataset, origin)


def missing(folder: Path, names: Sequence[str], dataset: str, origin: str) -> DataError:
    """The error for files that are not there."""
    missing_names = f"{names[0]} is not" if len(names) == 1 else f"none of {', '.join(names)} is"
    absent = "" if folder.is_dir() else " (there is no such folder)"
    return DataError(
        f"data set {dataset!r}: {missing_names} in {folder.absolute()}{absent}; get it from {origin} "
        "and name its folder with --data-dir or FEDLOOP_DATA_DIR"
    )
