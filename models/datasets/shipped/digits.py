"""scikit-learn's bundled digits: 1,797 grey 8x8 images."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from edge_client.wire.preprocessing import ImageSchema
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out

FILE = Path("datasets", "data", "digits.csv.gz")
"""In scikit-learn: 64 pixels from 0 to 16 and the digit in each row."""


def load(seed: int) -> Dataset:
    """x [1797, 8, 8] in [0, 1], ten classes, a fifth of each held out.

    Raises:
        DataError: scikit-learn is not installed.
    """
    # Read here: importing scikit-learn for its `load_digits` takes sixty times as long as reading the file.
    with gzip.open(_path(), "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, delimiter=",")
    y = rows[:, -1].astype(np.int32)
    return Dataset(
        name="digits",
        x=np.ascontiguousarray(rows[:, :-1].reshape(-1, 8, 8) / 16, dtype=np.float32),
        y=y,
        test=held_out(y, seed),
        classes=10,
        class_names=tuple("0123456789"),
        image=ImageSchema("HW", maximum=16, divisor=16.0),
        notes=("8x8 grey images scaled to [0, 1].", "20 % of each class is held out, by the seed."),
    )


def _path() -> Path:
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("data set 'digits' comes with scikit-learn: pip install scikit-learn")
    path = Path(spec.submodule_search_locations[0]) / FILE
    if not path.is_file():
        raise DataError(
            f"data set 'digits': {path} is missing; install scikit-learn again: pip install --force-reinstall scikit-learn"
        )
    return path
