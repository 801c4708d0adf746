"""The params that a run starts from: the safetensors that `model.init` names, a file or a folder in Hugging Face's layout.

model.safetensors               in such a folder, or in the output folder of a run
model.safetensors.index.json    instead, for a model in several files: `weight_map` says which file has a tensor
config.json                     read if the run trains `gpt` or `bert`, whose tensors have other names there
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.model_references import HF_INDEX, PARAMS
from edge_client.files import read_regular
from edge_client.wire import arrays
from models.hugging_face import config as hugging_face
from models.hugging_face.arrays import renamed
from models.options import JobError
from strategies.params import Params, ShapeMismatch, require_same_shapes


def read_init(experiment: Experiment) -> bytes | None:
    """Contents of the file that `model.init` names, or of the files of a folder as those of one; None if it names none.

    Raises:
        UserError: a file cannot be read, or a folder has no safetensors in the layout above.
    """
    init = experiment.model.init
    if init is None:
        return None
    path = Path(init)
    try:
        if not path.is_dir():
            return read_regular(path)
        content = _read_folder(path)
        return _renamed(path, content) if experiment.model.name in hugging_face.COUNTERPARTS else content
    except OSError as error:
        raise UserError(f"model.init = {init!r}: {error.strerror}") from None
    except (arrays.Malformed, JobError) as error:
        raise UserError(f"model.init = {init!r}: {error}") from None


def _renamed(folder: Path, content: bytes) -> bytes:
    """The tensors of a folder's files under the names of our model, if the folder is of a family that ours can be."""
    if not hugging_face.is_covered(folder):
        return content
    return arrays.encode(renamed(hugging_face.read(folder), arrays.decode(content)))


def join_files(contents: Iterable[bytes]) -> bytes:
    """The tensors of several safetensors files as those of one file.

    Raises:
        Malformed: one of them is no safetensors file, or two have a tensor of the same name.
    """
    joined: dict[str, np.ndarray] = {}
    for content in contents:
        for name, value in arrays.decode(content).items():
            if name in joined:
                raise arrays.Malformed(f"tensor {name!r} is in two files")
            joined[name] = value
    return arrays.encode(joined)


def _read_folder(folder: Path) -> bytes:
    if (folder / PARAMS).is_file():
        return read_regular(folder / PARAMS)
    if not (folder / HF_INDEX).is_file():
        raise arrays.Malformed(f"the folder has neither {PARAMS} nor {HF_INDEX}")
    names = _files_of_index(read_regular(folder / HF_INDEX))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise arrays.Malformed(f"{HF_INDEX} names {missing[0]!r}, which is not in the folder")
    return join_files(read_regular(folder / name) for name in names)


def _files_of_index(content: bytes) -> list[str]:
    try:
        files = {str(file) for file in json.loads(content)["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise arrays.Malformed(f"{HF_INDEX} has no weight_map") from None
    for file in files:
        if Path(file).name != file:
            raise arrays.Malformed(
                f"{HF_INDEX} names {file!r}, which is not the name of a file in the folder"
            )
    return sorted(files)


def decode_init(named: str, content: bytes, built: Params) -> Params:
    """The params of a safetensors file, as float32. `named`: its name in messages; `built`: the model's own params.

    Raises:
        UserError: it is not a safetensors file, or does not fit the model.
    """
    try:
        params = arrays.decode(content)
        require_same_shapes(params, built)
    except arrays.Malformed:  # its message could quote a file of another kind
        raise UserError(f"{named} is not a safetensors file") from None
    except ShapeMismatch as error:
        raise UserError(f"{named} does not fit the model: {error}") from None
    return {name: value.astype(np.float32) for name, value in params.items()}
