"""JSON has no word for infinity and NaN: what databases store and reports tell instead."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """The JSON value with None in place of every number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def is_finite(value: Any) -> bool:
    """Whether the JSON value holds no number that `finite` would replace."""
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def dumps(value: Any, **options: Any) -> str:
    """The value as JSON that every reader understands. `options` as of `json.dumps`.

    Raises:
        ValueError: it holds infinity or NaN; figures that may are to go through `finite`.
    """
    return json.dumps(value, allow_nan=False, **options)
