"""Images in a folder for each class: <path>/<class>/<any name>.png.

A class is the folder's name: one of the option `classes`, or a class index. Images are brought to the option
`shape`, which is required: [height, width] or [1, height, width] in grey, [3, height, width] in colour.
Pixels are float32 from 0 to 1 unless the option `scale` is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_client.data.connector import Connector, DataConfig, DataProblem
from edge_client.data.labels import Labels
from edge_client.data.options import Options, read_only_problem, read_options
from edge_client.data.rows import Rows, files_connector

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

_PIXEL = 1 / 255
_MAX_PIXELS = 64_000_000


def open_connector(config: DataConfig) -> Connector:
    """A Connector to an image folder.

    Raises:
        DataProblem: Pillow is not installed here, or an option does not fit.
    """
    options, path = read_options(Options, config)
    require_pillow()
    if not (len(options.shape) == 2 or (len(options.shape) == 3 and options.shape[0] in (1, 3))):
        raise DataProblem(
            f"images: option shape is {list(options.shape)}, expected [height, width] or [3, height, width]"
        )
    if options.dtype == "int32":
        raise DataProblem("images: option dtype is int32, pixels are float32")
    if options.label_scale:
        raise DataProblem("images: option label_scale is for labels that are quantities, a folder is a class")
    return files_connector(options, path, lambda each: _rows(each, options))


def _rows(path: Path, options: Options) -> Rows:
    try:
        files = [(file, index) for folder, index in _classes(path, options) for file in _images(folder)]
    except OSError as error:
        raise read_only_problem(path, error) from None
    if not files:
        raise DataProblem(f"{path}: no class folder holds an image ({', '.join(SUFFIXES)})")
    x = np.empty((len(files), *options.shape), np.float32)
    for place, (file, _) in enumerate(files):
        x[place] = _pixels(file, options.shape)
    x *= np.float32(_PIXEL if options.scale is None else options.scale)
    y = np.asarray([index for _, index in files], np.int32)
    return Rows(x, y, None, (("image", f"{'x'.join(map(str, options.shape))} pixels"), ("class", "folder")))


def _classes(path: Path, options: Options) -> Iterator[tuple[Path, int]]:
    """Class folders and their indices, in the order of their names."""
    folders = [each for each in sorted(path.iterdir()) if each.is_dir() and not each.name.startswith(".")]
    names = [folder.name for folder in folders]
    indices = Labels(options.classes).indices(names, lambda row: str(folders[row]))
    return zip(folders, indices.tolist(), strict=True)


def _images(folder: Path) -> list[Path]:
    return sorted(
        file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )


def _pixels(file: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    *_, height, width = shape
    colour = len(shape) == 3 and shape[0] == 3
    pixels = read_image(file, colour=colour, size=(width, height), resize=True)
    return pixels.transpose(2, 0, 1) if colour else pixels.reshape(shape)


def read_image(
    file: Path, *, colour: bool, size: tuple[int, int], resize: bool = False
) -> npt.NDArray[np.uint8]:
    """The pixels [height, width, 1 or 3] of an image file. `size`: width and height; images of another are refused or resized.

    Raises:
        DataProblem: Pillow is not installed, or the file is no image, is too large, or has another size.
    """
    require_pillow()
    from PIL import Image

    try:
        with Image.open(file) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise DataProblem(f"{file}: has {image.width} x {image.height} pixels, too many to read")
            if image.size != size and not resize:
                raise DataProblem(
                    f"{file}: has {image.width} x {image.height} pixels, expected {size[0]} x {size[1]}; resize it"
                )
            if image.mode.startswith(("I", "F")):
                raise DataProblem(f"{file}: has more than 8 bits a pixel; save it with 8 bits")
            fitted: Any = image.convert("RGB" if colour else "L")
            if fitted.size != size:
                fitted = fitted.resize(size, Image.Resampling.BILINEAR)
            pixels = np.asarray(fitted, np.uint8)
    except DataProblem:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataProblem(f"{file}: cannot be read as an image: {error}; replace or remove it") from None
    return pixels.reshape(size[1], size[0], -1)


def require_pillow() -> None:
    """Raises DataProblem: Pillow is not installed here."""
    try:
        import PIL  # noqa: F401 - imported early, so that a preview reports it
    except ModuleNotFoundError:
        raise DataProblem(
            "images need Pillow on this device: pip install 'fedloop[data]'; predictions also take a .npy of pixels"
        ) from None
