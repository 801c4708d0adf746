"""The tensors of a folder in Hugging Face's layout, each read when it is asked for.

    model.safetensors               one file, or
    model.safetensors.index.json    `weight_map`: tensor -> one of several files

Only what is asked for is read (`models.tensor_file`). Pickles (.bin, .pt) are never opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from models import tensor_file
from models.hugging_face.config import INDEX, WEIGHTS, read_json
from models.options import JobError
from models.tensor_file import Stored

Shape = tuple[int, ...]
Slices = tuple[slice, ...]
LIMIT_BYTES = 64 * 1024**3
"""Largest file of weights accepted."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Folder:
    """The tensors of a folder, or of one file.

    Attributes:
        path: of the folder or file.
        tensors: by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Stored]) -> None:
        self.path, self.tensors = path, tensors

    @property
    def names(self) -> list[str]:
        return sorted(self.tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def mismatches(self, expected: Mapping[str, Shape]) -> list[str]:
        """One phrase for each of these tensors that is missing or has another shape."""
        problems = [f"{name!r} is missing" for name in sorted(expected.keys() - self.tensors.keys())]
        return problems + [
            f"{name!r} is {self.tensors[name].shape}, the model has {expected[name]}"
            for name in sorted(expected.keys() & self.tensors.keys())
            if self.tensors[name].shape != expected[name]
        ]

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        """A tensor, or a part of it, as float32. Holds no other part in memory.

        Args:
            slices: of its first dims, with step 1.

        Raises:
            JobError: there is no such tensor, or it holds no floats.
        """
        if name not in self.tensors:
            raise JobError(f"{self.path}: tensor {name!r} is in none of its files")
        tensor = self.tensors[name]
        if tensor.dtype_name not in _FLOATS:
            raise JobError(
                f"{tensor.path}: tensor {name!r} is {tensor.dtype_name}, expected {', '.join(_FLOATS)}"
            )
        try:
            return tensor.read(slices).float()
        except OSError as error:
            raise JobError(f"{tensor.path}: {error.strerror or error}") from None


def open_folder(path: Path) -> Folder:
    """Opens the weights of a folder.

    Raises:
        JobError: it has no safetensors, a file is damaged, or the index does not fit the files; names the file.
    """
    if (path / WEIGHTS).is_file():
        files, listed = [path / WEIGHTS], None
    elif (path / INDEX).is_file():
        listed = _listed(path)
        files = [path / file for file in sorted(set(listed.values()))]
    else:
        raise JobError(_no_weights(path))
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, tensor in _tensors(file).items():
            if name in tensors:
                raise JobError(f"{file}: tensor {name!r} is in {tensors[name].path.name} too")
            tensors[name] = tensor
    if listed is not None:
        _require_index(path, listed, tensors)
    return Folder(path, tensors)


def open_file(path: Path) -> Folder:
    """Opens one file of weights.

    Raises:
        JobError: it cannot be read.
    """
    return Folder(path, _tensors(path))


def _tensors(file: Path) -> dict[str, Stored]:
    try:
        return tensor_file.read_header(file, LIMIT_BYTES)[0]
    except FileNotFoundError:
        raise JobError(f"{file} does not exist") from None
    except OSError as error:
        raise JobError(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        raise JobError(str(error)) from None


def _listed(path: Path) -> dict[str, str]:
    listed = read_json(path / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise JobError(f"{path / INDEX} has no weight_map, which names the file of every tensor")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise JobError(
                f"{path / INDEX}: tensor {name!r} is in {file!r}, expected a .safetensors file of the folder"
            )
    return listed


def _require_index(path: Path, listed: Mapping[str, str], tensors: Mapping[str, Stored]) -> None:
    for name in sorted(listed.keys() | tensors.keys()):
        found = tensors[name].path.name if name in tensors else None
        if listed.get(name) != found:
            raise JobError(
                f"{path / INDEX}: tensor {name!r} is in {listed.get(name) or 'no file'}, expected {found or 'no such tensor'}"
            )


def _no_weights(path: Path) -> str:
    pickles = sorted(each.name for each in path.iterdir() if each.suffix in _PICKLES) if path.is_dir() else []
    if pickles:
        return (
            f"{path / pickles[0]}: is a file of Python pickles, which can run any program when it is loaded, so it is not "
            f"opened; expected {WEIGHTS}: save the weights as safetensors first (save_pretrained of transformers does)"
        )
    return f"{path}: has neither {WEIGHTS} nor {INDEX}"
