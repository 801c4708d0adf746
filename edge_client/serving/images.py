"""Image files and arrays of pixels as the input of a model, by its schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import DataProblem
from edge_client.data.image_folder import SUFFIXES, read_image
from edge_client.data.options import read_only_problem
from edge_client.wire.preprocessing import ImageSchema

_CHANNELS = {1: "grey", 3: "colour"}


@dataclass(frozen=True)
class ImageFile:
    """`folder`: the name of the class folder it lies in; None of an image given by itself or in a folder without classes."""

    path: Path
    folder: str | None = None


def image_files(path: Path) -> list[ImageFile]:
    """The image at `path`, or those of a folder by name: directly in it, or in a folder for each class.

    Raises:
        DataProblem: a folder holds none, or both images and folders of images.
    """
    if not path.is_dir():
        return [ImageFile(path)]
    try:
        direct = [ImageFile(each) for each in _images(path)]
        folders = [each for each in sorted(path.iterdir()) if each.is_dir() and not each.name.startswith(".")]
        nested = [ImageFile(each, folder.name) for folder in folders for each in _images(folder)]
    except OSError as error:
        raise read_only_problem(path, error) from None
    if bool(direct) == bool(nested):
        holds = "both images and folders of images" if direct else "no image"
        raise DataProblem(
            f"{path}: holds {holds}; expected images ({', '.join(SUFFIXES)}), or a folder of them for each class"
        )
    return direct or nested


def _images(folder: Path) -> list[Path]:
    return sorted(
        each for each in folder.iterdir() if each.suffix.lower() in SUFFIXES and not each.name.startswith(".")
    )


def read_images(
    files: Sequence[ImageFile], schema: ImageSchema, input_shape: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    """Image files as the input, float32 [N, *input_shape]; 0 to 255 stands for 0 to the schema's maximum.

    Raises:
        DataProblem: Pillow is missing, or a file is no image, or of another size.
    """
    height, width, channels = schema.size(input_shape)
    pixels = np.empty((len(files), height, width, channels), np.uint8)
    for row, file in enumerate(files):
        pixels[row] = read_image(file.path, colour=channels == 3, size=(width, height))
    return _values(pixels, schema, input_shape, schema.maximum / 255)


def from_pixels(
    pixels: npt.NDArray[np.integer], schema: ImageSchema, input_shape: tuple[int, ...], place: str
) -> npt.NDArray[np.float32]:
    """Whole numbers [N, *input_shape], one image of that shape, or N flat images as the input. `place` begins an error.

    Raises:
        DataProblem: they have another size, or are not between 0 and the schema's maximum.
    """
    height, width, channels = schema.size(input_shape)
    found = pixels[None] if pixels.shape == input_shape else pixels
    flat = found.ndim == 2 and found.shape[1] == height * width * channels
    if not flat and found.shape[1:] not in _shapes(height, width, channels, input_shape):
        raise DataProblem(
            f"{place}: images are {list(found.shape[1:] if found.ndim > 2 else found.shape)}, expected {width} x {height} pixels in "
            f"{_CHANNELS[channels]}, {list(input_shape)}"
        )
    if found.size and (found.min() < 0 or found.max() > schema.maximum):
        raise DataProblem(
            f"{place}: pixels are {found.min()} to {found.max()}, those the model was trained on 0 to {schema.maximum}; scale them, or "
            "save an image file"
        )
    shaped = found.reshape(len(found), *input_shape)
    axes = {"HW": shaped[..., None], "HWC": shaped}.get(schema.layout)
    last = shaped.transpose(0, 2, 3, 1) if axes is None else axes
    return _values(last, schema, input_shape, 1.0)


def _shapes(height: int, width: int, channels: int, input_shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {input_shape} | ({(height, width)} if channels == 1 else set())


def _values(
    pixels: npt.NDArray[np.integer], schema: ImageSchema, input_shape: tuple[int, ...], stretch: float
) -> npt.NDArray[np.float32]:
    """`pixels`: [N, H, W, C], times `stretch` the pixels of training."""
    values = pixels.astype(np.float32)
    if stretch != 1:
        values *= np.float32(stretch)
    values /= np.float32(schema.divisor)
    if schema.mean:
        values -= np.asarray(schema.mean, np.float32)
        values /= np.asarray(schema.deviation, np.float32)
    ordered = values.transpose(0, 3, 1, 2) if schema.layout == "CHW" else values
    return np.ascontiguousarray(ordered.reshape(len(values), *input_shape))
