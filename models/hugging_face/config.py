"""What a config.json says of a model, as ours are described, and the other way round. No framework here.

    GPT-2, Llama, Qwen2    `gpt`
    BERT                   `bert`

A key that changes what a model computes, and that ours do not have, is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.files import read_regular
from models.hugging_face import bert, decoders
from models.hugging_face.keys import Keys, Unsupported
from models.options import JobError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FAMILIES = (*decoders.FAMILIES, "bert")
"""Each `model_type` that is read."""
COUNTERPARTS = {"gpt": "GPT-2, Llama or Qwen2", "bert": "BERT"}
"""Models of ours -> what they are written as."""
LIMIT_BYTES = 16 * 1024**2
"""Largest config.json or index accepted."""


@dataclass(frozen=True)
class Description:
    """A model of ours.

    Attributes:
        name, options: in the catalog.
        length: tokens of the longest sequence.
        classes: size of the last axis of the logits.
        task: as of `models.zoo.spec.Spec`.
        family: `model_type` of the config.
    """

    name: str
    options: Mapping[str, Any]
    length: int
    classes: int
    task: str = "next_token"
    family: str = field(default="", compare=False)

    def described(self) -> dict[str, Any]:
        """As job files describe it."""
        return {
            "name": self.name,
            "options": dict(self.options),
            "input_shape": [self.length],
            "classes": self.classes,
            "input_dtype": "int32",
            "task": self.task,
        }


def is_folder(path: Path) -> bool:
    """Whether this is a folder in the layout, by its config.json."""
    return (path / CONFIG).is_file()


def is_covered(folder: Path) -> bool:
    """Whether this is a folder in the layout of one of the families that are read, whatever else is in it."""
    if not is_folder(folder):
        return False
    try:
        return read_json(folder / CONFIG).get("model_type") in FAMILIES
    except JobError:
        return False


def read(folder: Path) -> Description:
    """The model of a folder.

    Raises:
        JobError: config.json is missing or damaged, or describes a model that ours cannot be; names the file and the key.
    """
    path = folder / CONFIG
    config = read_json(path)
    family = config.get("model_type")
    try:
        if family in decoders.FAMILIES:
            found = decoders.read(Keys(config))
        elif family == "bert":
            found = bert.read(Keys(config), mask_token(folder))
        else:
            raise Unsupported(f"model_type is {family!r}, expected one of {', '.join(FAMILIES)}")
    except Unsupported as error:
        raise JobError(f"{path}: {error}") from None
    return Description(**found, family=str(family))


def write(described: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model, which job files would describe so.

    Raises:
        JobError: no published architecture is this model; names the option.
    """
    try:
        if described["name"] == "gpt":
            return decoders.write(described)
        if described["name"] == "bert":
            return bert.write(described)
        raise Unsupported(f"model {described['name']!r} has no counterpart there; expected {counterparts()}")
    except Unsupported as error:
        raise JobError(f"cannot be written in Hugging Face's layout: {error}") from None


def counterparts() -> str:
    """The models that can be written, for messages."""
    return " or ".join(f"{name} (as {theirs})" for name, theirs in COUNTERPARTS.items())


def mask_token(folder: Path) -> int | None:
    """The id of [MASK] by tokenizer.json or vocab.txt; None if neither says it."""
    if (path := folder / "tokenizer.json").is_file():
        added = read_json(path).get("added_tokens")
        for token in added if isinstance(added, list) else ():
            if (
                isinstance(token, dict)
                and token.get("content") == "[MASK]"
                and isinstance(token.get("id"), int)
            ):
                return int(token["id"])
    if (path := folder / "vocab.txt").is_file():
        words = read_regular(path, LIMIT_BYTES).decode("utf-8", "replace").splitlines()
        return words.index("[MASK]") if "[MASK]" in words else None
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a folder.

    Raises:
        JobError: it is missing, or no JSON object.
    """
    try:
        document = json.loads(read_regular(path, LIMIT_BYTES))
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise JobError(f"{path} holds {type(document).__name__}, expected an object")
    return document
