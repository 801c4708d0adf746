"""The tensors of a folder in Hugging Face's layout, each read when it is asked for.

    model.safetensors               one file, or
    model.safetensors.index.json    `weight_map`: tensor -> one of several files

Files are mapped into memory and only what is asked for is read. Pickles (.bin, .pt) are never opened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models.hugging_face.config import INDEX, WEIGHTS, read_json
from models.options import JobError

Slices = tuple[slice, ...]
_FLOATS = ("F64", "F32", "F16", "BF16")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Folder:
    """The tensors of a folder.

    Attributes:
        path: of the folder.
        tensors: by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], handles: Mapping[Path, Any]) -> None:
        self.path, self.tensors = path, tensors
        self._handles = handles

    @property
    def names(self) -> list[str]:
        return sorted(self.tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

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
        if tensor.dtype not in _FLOATS:
            raise JobError(f"{tensor.file}: tensor {name!r} is {tensor.dtype}, expected {', '.join(_FLOATS)}")
        part = self._handles[tensor.file].get_slice(name)
        if not tensor.shape:
            return torch.as_tensor(self._handles[tensor.file].get_tensor(name)).float()
        whole = tuple(slice(0, size) for size in tensor.shape)
        values: torch.Tensor = part[(*slices, *whole[len(slices) :])]
        return values.float()

    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def open_folder(path: Path) -> Folder:
    """Opens the weights of a folder.

    Raises:
        JobError: it has no safetensors, a file is damaged, or the index does not fit the files; names the file.
    """
    if (path / WEIGHTS).is_file():
        files = {path / WEIGHTS: None}
        listed: dict[str, str] | None = None
    elif (path / INDEX).is_file():
        listed = _listed(path)
        files = dict.fromkeys(path / file for file in sorted(set(listed.values())))
    else:
        raise JobError(_no_weights(path))
    handles = {file: _open(file) for file in files}
    tensors: dict[str, Tensor] = {}
    for file, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
            if name in tensors:
                raise JobError(f"{file}: tensor {name!r} is in {tensors[name].file.name} too")
            part = handle.get_slice(name)
            tensors[name] = Tensor(file, tuple(part.get_shape()), part.get_dtype())
    if listed is not None:
        _require_index(path, listed, tensors)
    return Folder(path, tensors, handles)


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


def _require_index(path: Path, listed: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    for name in sorted(listed.keys() | tensors.keys()):
        found = tensors[name].file.name if name in tensors else None
        if listed.get(name) != found:
            raise JobError(
                f"{path / INDEX}: tensor {name!r} is in {listed.get(name) or 'no file'}, expected {found or 'no such tensor'}"
            )


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise JobError(f"{file} does not exist, and {INDEX} names it") from None
    except (OSError, SafetensorError) as error:
        raise JobError(f"{file} is not a readable .safetensors file: {error}") from None


def _no_weights(path: Path) -> str:
    pickles = sorted(each.name for each in path.iterdir() if each.suffix in _PICKLES) if path.is_dir() else []
    if pickles:
        return (
            f"{path / pickles[0]}: is a file of Python pickles, which can run any program when it is loaded, so it is not "
            f"opened; expected {WEIGHTS}: save the weights as safetensors first (save_pretrained of transformers does)"
        )
    return f"{path}: has neither {WEIGHTS} nor {INDEX}"
