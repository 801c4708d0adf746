"""Models in Hugging Face's layout: a folder of theirs as one that `fedloop pretrain` leaves, and the other way round.

The conversion itself runs in a worker (`models.pretrain.convert`), because it needs PyTorch. Files of a tokenizer go with the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coordinator.datacenter import jobs
from coordinator.datacenter.documents import (
    LINEAGE,
    MODEL,
    PARAMS,
    PUBLIC,
    params_sha256,
    read_document,
    write_document,
)
from coordinator.datacenter.jobs import DatacenterJob
from coordinator.datacenter.predictions import open_model
from coordinator.datacenter.training_data import as_user_errors
from coordinator.errors import UserError
from coordinator.output_folders import require_new
from coordinator.reports.run_files import write_schema
from coordinator.storage.private_folders import private_folder
from edge_client.files import file_sha256, make_durably, read_regular, write_durably
from edge_client.serving import tokenizer_json
from edge_client.wire import schema as schemas
from edge_client.wire.preprocessing import TextSchema
from edge_client.wire.schema import SCHEMA_NAME
from models.hugging_face import config as configs
from models.hugging_face.config import CONFIG

_TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "generation_config.json",
)
_LOADED_BY = {"tokenizer_class": "PreTrainedTokenizerFast"}


def import_folder(source: Path, out: Path) -> dict[str, Any]:
    """Writes the model of a Hugging Face folder into the new or empty folder `out`, and returns its description.

    Raises:
        UserError: a file is missing or damaged, or the model is none of ours; names the file, the key or the tensor.
    """
    require_new(out)
    with private_folder() as scratch:
        job = DatacenterJob("convert", {}, {}, more={"from": str(source.absolute())})
        with as_user_errors():
            result = jobs.run(job, scratch)
        out.mkdir(parents=True, exist_ok=True)
        make_durably(out / PARAMS, lambda place: shutil.copyfile(scratch / PARAMS, place))
    digest = file_sha256(out / PARAMS)
    schema = result["schema"]
    model = {**result["model"], "class_names": schema["classes"] if schema else [], "sha256": digest}
    _copy_tokenizer(source, out)
    write_schema(out, schema)
    write_document(out / MODEL, model)
    lineage = {
        "model_sha256": digest,
        "parent": {"path": str(source.absolute()), "sha256": params_sha256(source)},
        "data_fingerprint": None,
        PUBLIC: False,
        "code_version": version("fedloop"),
        "seed": 0,
    }
    write_document(out / LINEAGE, lineage)
    return {
        "model": model,
        "parameters": result["parameters"],
        "lineage": lineage,
        "text": _how_read(source, schema),
    }


def _how_read(source: Path, schema: dict[str, Any] | None) -> str:
    """What the rows of the model are, for people."""
    if schema is not None:
        return f"it reads texts by {_TOKENIZER}"
    if (source / _TOKENIZER).is_file():
        return "it takes token ids: it predicts masked tokens, and no text that follows"
    return (
        f"it takes token ids: {source} has no {_TOKENIZER}, which AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers "
        "writes"
    )


def export_folder(source: Path, out: Path, tokenizer: Path | None = None) -> dict[str, Any]:
    """Writes the trained model in `source` as a Hugging Face folder into the new or empty folder `out`.

    Args:
        tokenizer: folder of the tokenizer's files. By default that of the model itself or of the folder that its training
            started from, if the model's texts are read by it; else that of its data or of its schema.

    Raises:
        UserError: there is no model, or no published architecture is this one; names the option.
    """
    require_new(out)
    described = open_model(source).description
    if described is None:
        raise UserError(
            f"{source}: is a release, whose params are converted; export the model that it was made of"
        )
    require_counterpart(str(source), described["name"])
    with private_folder() as scratch:
        job = DatacenterJob(
            "convert", described, {}, params=source / PARAMS, more={"to": str(scratch.absolute() / "written")}
        )
        with as_user_errors():
            result = jobs.run(job, scratch)
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted((scratch / "written").iterdir()):
            make_durably(out / file.name, lambda place, file=file: shutil.move(file, place))  # type: ignore[misc]
    if (source / MODEL).is_file():
        _write_class_names(out, result["config"], read_document(source / MODEL).get("class_names", []))
    result["tokenizer"] = _write_tokenizer(source, out, tokenizer)
    return result


def require_counterpart(found: str, name: object) -> None:
    """Requires a model that has a counterpart at Hugging Face, before any code of it runs. `found`: what has it, in messages.

    Raises:
        UserError: it has none; names those that have one.
    """
    if name not in configs.COUNTERPARTS:
        raise UserError(
            f"{found} is of model {str(name)[:100]!r}, which has no counterpart at Hugging Face; those that have one: "
            f"{configs.counterparts()}"
        )


def _write_class_names(out: Path, config: dict[str, Any], names: Sequence[str]) -> None:
    """Writes the names of a classifier's classes into its config.json."""
    if names and "id2label" in config:
        config |= {
            "id2label": {str(index): name for index, name in enumerate(names)},
            "label2id": {name: index for index, name in enumerate(names)},
        }
        write_document(out / CONFIG, config)


def _write_tokenizer(source: Path, out: Path, named: Path | None) -> str | None:
    """Where the tokenizer's files came from; None if there are none."""
    if named is not None:
        if not _copy_tokenizer(named, out):
            raise UserError(f"--tokenizer {named}: has none of {', '.join(_TOKENIZER_FILES)}")
        return str(named)
    parent = read_document(source / LINEAGE).get("parent") if (source / LINEAGE).is_file() else None
    started = Path(parent["path"]) if isinstance(parent, dict) and parent.get("path") else None
    if started is not None and started.name == PARAMS:  # in the folder of an import
        started = started.parent
    text = _text_of(source)
    for folder in (source, started):
        if folder is not None and _is_of(folder, text) and _copy_tokenizer(folder, out):
            return str(folder)
    arrays = source / "data" / "arrays"
    if text is not None:
        _write_content(out, text.tokenizer, text)
        return str(source / SCHEMA_NAME)
    if (arrays / _TOKENIZER).is_file():  # of token files
        _write_content(out, read_regular(arrays / _TOKENIZER).decode(), None)
        return str(arrays / _TOKENIZER)
    learnt = arrays / "encoding.json"
    if learnt.is_file() and (known := json.loads(read_regular(learnt))).get("kind") == "bpe":
        _write_content(out, json.dumps(known["tokenizer"], ensure_ascii=False), None)
        return str(learnt)
    return None


def _text_of(source: Path) -> TextSchema | None:
    """How the model reads texts, if by a tokenizer."""
    path = source / SCHEMA_NAME
    text = schemas.from_json(read_regular(path), str(path)).text if path.is_file() else None
    return text if text is not None and text.tokenizer else None


def _is_of(folder: Path, text: TextSchema | None) -> bool:
    """Whether a folder's tokenizer, if it has one, is that by which the model reads texts."""
    path = folder / _TOKENIZER
    if text is None or not path.is_file():
        return folder.is_dir()
    return bool(json.loads(read_regular(path)) == json.loads(text.tokenizer))


def _write_content(out: Path, content: str, text: TextSchema | None) -> None:
    """Writes a tokenizer that has no other files. `text`: its schema, which says what ends a text."""
    end = None if text is None or text.end is None else tokenizer_json.written(text.end, content)
    write_durably(out / _TOKENIZER, content.encode())
    write_document(
        out / "tokenizer_config.json", _LOADED_BY if end is None else {**_LOADED_BY, "eos_token": end}
    )


def _copy_tokenizer(source: Path, out: Path) -> bool:
    """Whether there was a tokenizer to copy."""
    found = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        write_durably(out / name, read_regular(source / name))
    return any(name != "generation_config.json" for name in found)
