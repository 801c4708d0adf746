"""Which files of a folder on disk belong to a version to register.

`gather` takes a folder that Fedloop wrote and detects its kind; `gather_foreign` takes files from elsewhere.
Arrays, checkpoints and logs are not registered.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from coordinator.errors import UserError
from coordinator.registry.contents import Content, content_of, document
from coordinator.registry.kinds import FILES, HF_CONFIG, HF_INDEX, LINEAGE, PARAMS, Kind, is_compression
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME

_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")

Gathered = tuple[Kind, dict[str, Content]]


def gather(folder: Path) -> Gathered:
    """The kind of a folder that Fedloop wrote, and its files by their paths in the version.

    Raises:
        UserError: there is no such folder, or Fedloop did not write it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    if (folder / MANIFEST_NAME).is_file():
        return "inference", _files(folder, FILES["inference"])
    files = _files(folder, FILES["compressed"])
    if LINEAGE in files and is_compression(document(files, LINEAGE)):
        return "compressed", files
    if PARAMS in files:
        files.pop(MODEL_NAME, None)
        return "params", files
    raise UserError(
        f"{folder}: has no {PARAMS} and no {MANIFEST_NAME}; expected a finished folder "
        "of `fedloop pretrain`, `simulate`, `run`, `compress` or `export`. Models from elsewhere: fedloop model import"
    )


def gather_foreign(path: Path) -> Gathered:
    """The kind of a file or folder from elsewhere, and its files. For ONNX see `coordinator.operator.onnx_models`.

    Raises:
        UserError: it is neither safetensors nor .tflite; pickles are never opened.
    """
    if path.is_dir():
        return "weights", _hugging_face(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file or folder")
    if path.suffix == ".safetensors":
        return "weights", {PARAMS: content_of(path)}
    if path.suffix == ".tflite":
        return "tflite", {MODEL_NAME: content_of(path)}
    if path.suffix in _PICKLED:
        raise UserError(f"{path}: {_PICKLE_MESSAGE}")
    raise UserError(
        f"{path}: expected a .safetensors, .tflite or .onnx file or a Hugging Face folder of safetensors"
    )


_PICKLE_MESSAGE = (
    "is a file of Python pickles, which can run any program when it is loaded, so it is not opened; save the weights as "
    "safetensors first (safetensors.torch.save_file)"
)


def _hugging_face(folder: Path) -> dict[str, Content]:
    shards = sorted(each.name for each in folder.glob("*.safetensors") if _SHARD.fullmatch(each.name))
    if not shards:
        if pickled := pickles(folder):
            raise UserError(f"{folder / pickled[0]}: {_PICKLE_MESSAGE}")
        raise UserError(f"{folder}: has no .safetensors files")
    if not (folder / HF_CONFIG).is_file():
        raise UserError(f"{folder}: has no {HF_CONFIG}; expected a Hugging Face folder, or name one file")
    index = (HF_INDEX,) if (folder / HF_INDEX).is_file() else ()
    return _files(folder, (HF_CONFIG, *index, *shards))


def _files(folder: Path, names: tuple[str, ...]) -> dict[str, Content]:
    return {name: content_of(folder / name, folder) for name in names if os.path.lexists(folder / name)}


def pickles(folder: Path) -> list[str]:
    """Names of the pickle files in a folder from elsewhere; they are not registered."""
    return sorted(each.name for each in folder.iterdir() if each.suffix in _PICKLED)
