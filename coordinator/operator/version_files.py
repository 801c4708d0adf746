"""Files of versions on disk: which files of a folder belong to a version, and their transfer to a coordinator.

`gather` takes a folder that Fedloop wrote and detects its kind; `gather_foreign` takes files from elsewhere. Arrays,
checkpoints and logs are not registered. Files are sent in pieces, checked by hash.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coordinator.errors import UserError
from coordinator.model_references import HF_INDEX, PARAMS
from coordinator.operator.client import OnBytes, OperatorClient, Refused
from coordinator.registry.contents import Content, Contents, content_of, document
from coordinator.registry.kinds import FILES, HF_CONFIG, LINEAGE, Kind, is_compression
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
    files = _files(folder, tuple(dict.fromkeys((*FILES["compressed"], *FILES["params"]))))
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


def add(
    client: OperatorClient,
    name: str,
    kind: Kind,
    contents: Contents,
    parents: Sequence[str] = (),
    *,
    renumber: bool = False,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, Any]:
    """Registers files as the next version of a model, and sends those that the coordinator lacks. Returns the version.

    Raises:
        Refused, Unreachable: from the client.
        UserError: a file changed meanwhile.
    """
    request = {
        "kind": kind,
        "files": {
            path: {"sha256": content.sha256, "size_bytes": content.size_bytes}
            for path, content in contents.items()
        },
        "parents": list(parents),
        "renumber": renumber,
    }
    return post_with_files(client, f"/models/{quote(name, safe='')}/versions", request, contents, on_bytes)


def post_with_files(
    client: OperatorClient,
    path: str,
    request: Mapping[str, Any],
    contents: Contents,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, Any]:
    """The response to a request that names files by hash, after sending those that the coordinator lacks.

    Raises: as `add`.
    """
    by_hash = {content.sha256: content for content in contents.values()}
    while True:
        try:
            response: dict[str, Any] = client.post(path, request)
            return response
        except Refused as refused:
            if refused.code != "missing_files":
                raise
            missing = [by_hash.pop(digest) for digest in refused.details["missing"] if digest in by_hash]
            if not missing:
                raise  # it was sent already
        for content in missing:
            try:
                with content.place.open("rb") as file:
                    client.upload(f"/model-files/{content.sha256}", file, content.size_bytes, on_bytes)
            except OSError as error:
                raise UserError(f"{content.place}: {error.strerror}") from None
