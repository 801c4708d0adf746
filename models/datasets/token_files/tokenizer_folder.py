"""A tokenizer as Hugging Face's folders have it: `tokenizer.json`, and which tokens end a text.

Those say, in this order, generation_config.json, config.json and tokenizer_config.json; else it is a usual one. Nothing here
runs code of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_client.data.connector import DataProblem
from edge_client.files import read_regular
from edge_client.serving import tokenizer_json
from models.datasets.dataset import DataError

TOKENIZER, CONFIG = "tokenizer.json", "config.json"

LIMIT_BYTES = 64 * 1024**2
"""Largest file accepted."""

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Special tokens that end a text in GPT-2 and Qwen, Llama 3, Llama 2, Gemma, and BERT."""

_PROBE = "a"


def read_content(path: Path) -> str:
    """The content of a tokenizer.json that makes ids of a text, as compact JSON.

    Raises:
        DataError: it is missing or damaged, is no tokenizer, or cannot encode a text; names the file.
    """
    content = json.dumps(_read(path), ensure_ascii=False, separators=(",", ":"))
    try:
        ids = tokenizer_json.encode(_PROBE, content, str(path))
        size = tokenizer_json.size(content)
    except DataProblem as error:
        raise DataError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    if any(index >= size for index in ids):
        raise DataError(f"{path}: adds id {max(ids)} to a text, and its tokens have ids below {size}")
    return content


def end_ids(folder: Path, content: str, vocabulary: int) -> list[int]:
    """The ids that end a text, the usual one first; none if nothing names one.

    Args:
        content: of the folder's tokenizer.json.
        vocabulary: ids are below it.

    Raises:
        DataError: a file is damaged, or names an id that there is not.
    """
    for name in ("generation_config.json", CONFIG):
        found = read_object(folder / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        for each in ids:
            if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < vocabulary:
                raise DataError(
                    f"{folder / name}: eos_token_id is {found!r}, expected token ids from 0 to {vocabulary - 1}"
                )
        if ids:
            return list(dict.fromkeys(ids))
    known = tokenizer_json.ids(content)
    end = read_object(folder / "tokenizer_config.json").get("eos_token")
    named = end.get("content") if isinstance(end, Mapping) else end
    return [known[name] for name in (named, *ENDS) if isinstance(name, str) and name in known][:1]


def vocabulary_of(folder: Path) -> int:
    """Rows of the embedding of the folder's model; 0 if it has no model. Raises: DataError: a file is damaged."""
    found = read_object(folder / CONFIG).get("vocab_size")
    return found if isinstance(found, int) else 0


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no file. Raises: DataError: it is damaged; names the file."""
    if not path.is_file():
        return {}
    found = _read(path)
    if not isinstance(found, dict):
        raise DataError(f"{path} holds {type(found).__name__}, expected an object")
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, LIMIT_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from None
