"""scikit-learn's bundled digits: 1,797 grey 8x8 images, the data set that is always there."""

from __future__ import annotations

import numpy as np

from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out


def load(seed: int) -> Dataset:
    """x [1797, 8, 8] in [0, 1], ten classes, a fifth of each held out.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("data set 'digits' comes with scikit-learn: pip install scikit-learn") from error
    bundle = load_digits()
    y = bundle.target.astype(np.int32)
    return Dataset(
        name="digits",
        x=np.ascontiguousarray(bundle.images / 16, dtype=np.float32),
        y=y,
        test=held_out(y, seed),
        classes=10,
        class_names=tuple("0123456789"),
        notes=("8x8 grey images scaled to [0, 1].", "20 % of each class is held out, by the seed."),
    )
