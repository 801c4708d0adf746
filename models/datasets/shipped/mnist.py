"""MNIST from its IDX files: 28x28 grey images of ten digits (LeCun, Cortes, Burges)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.wire.preprocessing import ImageSchema
from models.datasets import files
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out
from models.datasets.shipped import idx

ORIGIN = "https://github.com/cvdfoundation/mnist"
TRAINING = ("train",)
TEST = ("t10k", "mnist10k")
CLASSES = 10


def load(data_dir: Path | None, seed: int) -> Dataset:
    """x [N, 28, 28] in [0, 1]. The standard split where both its halves are there, else a fifth is held out.

    Raises:
        DataError: a file is missing, damaged or does not fit its companion.
    """
    folder = data_dir or Path.cwd()
    halves = [half for prefixes in (TRAINING, TEST) if (half := _half(folder, prefixes)) is not None]
    if not halves:
        names = [f"{prefix}-images-idx3-ubyte.gz" for prefix in (*TRAINING, *TEST)]
        raise files.missing(folder, names, "mnist", ORIGIN)
    x = np.concatenate([images for images, _ in halves])
    y = np.concatenate([labels for _, labels in halves])
    standard = len(halves) == 2
    return Dataset(
        name="mnist",
        x=x.astype(np.float32) / np.float32(255),
        y=y,
        test=np.arange(len(y)) >= len(halves[0][1]) if standard else held_out(y, seed),
        classes=CLASSES,
        class_names=tuple("0123456789"),
        image=ImageSchema("HW", maximum=255, divisor=255.0),
        notes=(
            "28x28 grey images scaled to [0, 1].",
            "The standard split into training and test images."
            if standard
            else "Only one half of MNIST is here: 20 % of each class is held out, by the seed.",
        ),
    )


def _half(
    folder: Path, prefixes: tuple[str, ...]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]] | None:
    """Images [n, 28, 28] and labels [n] of the first prefix whose images are there."""
    for prefix in prefixes:
        for ending in (".gz", ""):
            path = folder / f"{prefix}-images-idx3-ubyte{ending}"
            if path.is_file():
                names = [f"{prefix}-labels-idx1-ubyte{other}" for other in (".gz", "")]
                return _pair(path, files.find(folder, names, "mnist", ORIGIN))
    return None


def _pair(image_path: Path, label_path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    images, labels = idx.read(image_path, 3), idx.read(label_path, 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{image_path}: images of {images.shape[1]} x {images.shape[2]}, expected 28 x 28")
    if len(images) != len(labels):
        raise DataError(
            f"{label_path}: {len(labels):,} labels for {len(images):,} images in {image_path.name}"
        )
    if not len(labels):
        raise DataError(f"{image_path}: holds no image")
    if labels.max() >= CLASSES:
        raise DataError(
            f"{label_path}: label {labels.max()} at row {labels.argmax()}, expected 0 to {CLASSES - 1}"
        )
    return images, labels.astype(np.int32)
