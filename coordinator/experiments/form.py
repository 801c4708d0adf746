"""An experiment as a form: what each key may be, as JSON Schema, and a document as texts by key.

A key is `table.key`, or `key` at the top. Text is TOML as in `--set`, except that a string stands for itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import ConvertError

from coordinator.experiments.schema import Experiment
from models import catalog
from models.datasets import names
from strategies import presets
from strategies.options import Option


def experiment_schema() -> dict[str, Any]:
    """The JSON Schema of the experiment file. Options of models and strategies, which are open there, come apart."""
    return Experiment.model_json_schema()


def model_schemas() -> dict[str, dict[str, Any]]:
    """Name of each model of the catalog -> JSON Schema of its options."""
    return {name: entry.options.model_json_schema() for name, entry in catalog.MODELS.items()}


def strategy_schemas() -> dict[str, dict[str, Any]]:
    """Name of each strategy -> JSON Schema of its options."""
    return {
        name: {
            "type": "object",
            "properties": {key: _option_schema(each) for key, each in options.items()},
            "additionalProperties": False,
        }
        for name, options in presets.OPTIONS.items()
    }


def dataset_names() -> tuple[str, ...]:
    """The data sets that a coordinator can load by name."""
    return names.NAMES


def to_texts(document: Mapping[str, Any]) -> dict[str, str]:
    """The text of each key of a document, as written; keys deeper than a table's are part of their text."""
    texts = ((key, value if isinstance(value, str) else _toml(value)) for key, value in _leaves(document))
    return {encodable(key): encodable(text) for key, text in texts}


def encodable(text: str) -> str:
    """The text with halves of a character, which JSON can hold and UTF-8 cannot, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items() if inner is not None)
        elif value is not None:
            yield name, value


def _toml(value: Any) -> str:
    try:
        item = tomlkit.item(value)
        if isinstance(value, Mapping):
            item = tomlkit.inline_table()
            item.update(value)
        elif isinstance(value, list):  # else tables in a list get lines of their own
            item = tomlkit.array()
            item.extend(value)
    except ConvertError:  # TOML has no null
        return json.dumps(value, default=str)
    return str(item.as_string())


def _option_schema(option: Option) -> dict[str, Any]:
    schema: dict[str, Any] = {"default": option.default, "description": option.meaning}
    if option.choices:
        return {**schema, "type": "string", "enum": list(option.choices)}
    if isinstance(option.default, bool):
        return {**schema, "type": "boolean"}
    if isinstance(option.default, tuple):
        return {**schema, "default": list(option.default), "type": "array", "items": {"type": "string"}}
    if option.of_models:
        either = {"anyOf": [{"type": "string"}, {"type": "object"}]}
        return {**schema, "type": "object", "additionalProperties": either}
    limits = {
        "exclusiveMinimum" if option.low_open else "minimum": option.low,
        "exclusiveMaximum" if option.high_open else "maximum": option.high,
    }
    kind = "integer" if option.is_integer else "number"
    number = {"type": kind, **{key: at for key, at in limits.items() if math.isfinite(at)}}
    return (
        {**schema, "type": "object", "additionalProperties": number} if option.is_table else schema | number
    )
