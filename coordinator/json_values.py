"""JSON values for databases and reports: JSON has no infinity and no NaN, so they become None."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any


def finite(value: Any) -> Any:
    """The JSON value with every non-finite number replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def is_finite(value: Any) -> bool:
    """Whether all numbers in the JSON value are finite."""
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def dumps(value: Any, **options: Any) -> str:
    """The value as standard JSON. `options` as of `json.dumps`.

    Raises:
        ValueError: it holds infinity or NaN; pass such values through `finite` first.
    """
    return json.dumps(value, allow_nan=False, **options)


_STANDARD = json.JSONEncoder(allow_nan=False)


def dumps_finite(value: Any) -> str:
    """`dumps(finite(value))`. Most values are finite already and plain dicts and lists, which need not be copied."""
    try:
        return _STANDARD.encode(value)
    except (ValueError, TypeError):
        return dumps(finite(value))


def dumps_each(values: Sequence[Any]) -> list[str]:
    """`dumps_finite` of each of these values, faster for texts and for numbers."""
    kinds = set(map(type, values))
    if kinds == {str}:
        return list(map(encode_basestring_ascii, values))
    if kinds and kinds <= {int, float} and all(map(math.isfinite, values)):
        return dumps(values)[1:-1].split(", ")
    return [dumps_finite(value) for value in values]


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested objects, by their keys joined with dots."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
