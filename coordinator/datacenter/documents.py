"""The JSON documents that a datacenter command leaves in its output folder, their names, and the hash of params."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from edge_client.files import file_sha256, write_durably

CONFIG, PIPELINE, EXPERIMENT = "config.toml", "pipeline.toml", "experiment.toml"
REPORT, LINEAGE, MODEL = "report.json", "lineage.json", "model.json"
PARAMS, TFLITE, PACKED = "model.safetensors", "model.tflite", "packed.safetensors"
PUBLIC = "data_public"
"""Key of `lineage.json`: whether rows of the data may be published."""


def read_document(path: Path, *keys: str) -> dict[str, Any]:
    """The JSON object in `path`, which has at least `keys`.

    Raises:
        UserError: the file is missing, is not a JSON object, or lacks a key.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path.parent}: there is no {path.name} here; expected one of `fedloop compress`, `fedloop pretrain` or a finished run"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} holds {type(document).__name__}, expected an object")
    if missing := [key for key in keys if key not in document]:
        raise UserError(f"{path} lacks the key {missing[0]!r}; expected the file as the command left it")
    return document


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Writes `document` as JSON, durably."""
    write_durably(path, (json.dumps(document, indent=2) + "\n").encode())


def params_sha256(path: Path) -> str:
    """The hash of a file of params; of a Hugging Face folder that of its file, or of the list of the hashes of its files."""
    if not path.is_dir():
        return file_sha256(path)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return file_sha256(files[0])
    listed = "".join(f"{file_sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()
