"""Finding and reading the files of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_client.files import READ_LIMIT_BYTES, read_regular
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


def read_text(path: Path, limit_bytes: int = READ_LIMIT_BYTES, remedy: str = "") -> str:
    """The UTF-8 text in a file, with its line ends as they are.

    Raises:
        DataError: the file cannot be read, or is no UTF-8 text, which `remedy` may say what to do about.
    """
    try:
        return read_regular(path, limit_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text at byte {error.start:,}{remedy}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def missing(folder: Path, names: Sequence[str], dataset: str, origin: str) -> DataError:
    """The error for files that are not there."""
    missing_names = f"{names[0]} is not" if len(names) == 1 else f"none of {', '.join(names)} is"
    absent = "" if folder.is_dir() else " (there is no such folder)"
    return DataError(
        f"data set {dataset!r}: {missing_names} in {folder.absolute()}{absent}; get it from {origin} "
        "and name its folder with --data-dir or FEDLOOP_DATA_DIR"
    )
