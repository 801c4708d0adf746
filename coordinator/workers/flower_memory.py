"""What a strategy object of Flower keeps from round to round, such as FedAdam's moments: attributes as arrays and JSON.

An attribute that differs from that of a newly built object is stored. It may be an array of float32, a dict or a list of such arrays, an
ArrayRecord of them, or what JSON holds. An object that keeps anything else is refused, because a resumed run would go on without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from coordinator.errors import UserError
from strategies.params import Params

_ARRAYS = (np.ndarray, np.generic)  # arithmetic on an array of one value gives a scalar
_Stored = tuple[dict[str, Any], list[np.ndarray]]
"""How an attribute is stored, as JSON, and its arrays."""


def require_storable(name: str, strategy: Any) -> None:
    """Checks the attributes of a newly built object.

    Raises:
        UserError: one is neither storable nor code.
    """
    for attribute, value in vars(strategy).items():
        if not callable(value):
            _store(name, attribute, value)


def collect(name: str, strategy: Any, fresh: Any) -> tuple[dict[str, Any], Params]:
    """Attributes that differ from those of `fresh`, a newly built object: as JSON by name, and their arrays, `attribute/0`, ….

    Raises:
        UserError: one cannot be stored.
    """
    values, arrays = {}, {}
    before = vars(fresh)
    for attribute, value in vars(strategy).items():
        if callable(value):
            if attribute not in before or not callable(before[attribute]):
                raise UserError(
                    f"strategy.name = {name!r} keeps code in {attribute!r} from round to round, which cannot be stored"
                )
            continue
        document, parts = _store(name, attribute, value)
        if attribute in before and not callable(before[attribute]):
            known, same = _store(name, attribute, before[attribute])
            if known == document and all(np.array_equal(a, b) for a, b in zip(same, parts, strict=True)):
                continue
        values[attribute] = document
        arrays.update({f"{attribute}/{index}": part for index, part in enumerate(parts)})
    return values, arrays


def restore(strategy: Any, values: Mapping[str, Any], arrays: Params) -> None:
    """Sets the attributes that were collected."""
    for attribute, document in values.items():
        count = len(document["keys"]) if "keys" in document else int(document["kind"] == "array")
        parts = [arrays[f"{attribute}/{index}"] for index in range(count)]
        setattr(strategy, attribute, _READ[document["kind"]](document, parts))


def _store(name: str, attribute: str, value: Any) -> _Stored:
    if isinstance(value, np.ndarray):
        stored: _Stored = {"kind": "array"}, [value]
    elif isinstance(value, np.generic):
        number = value.item()
        if _is_json(number):
            return {"kind": "scalar", "value": number, "dtype": str(value.dtype)}, []
        stored = {"kind": "array"}, [np.asarray(value)]
    elif isinstance(value, ArrayRecord):
        stored = {"kind": "record", "keys": list(value)}, [each.numpy() for each in value.values()]
    elif isinstance(value, dict) and value and all(isinstance(each, _ARRAYS) for each in value.values()):
        stored = {"kind": "dict", "keys": list(value)}, [np.asarray(each) for each in value.values()]
    elif isinstance(value, list) and value and all(isinstance(each, _ARRAYS) for each in value):
        stored = {"kind": "list", "keys": list(range(len(value)))}, [np.asarray(each) for each in value]
    elif _is_json(value):
        return {"kind": "json", "value": value}, []
    else:
        raise UserError(
            f"strategy.name = {name!r} keeps {type(value).__name__} in its attribute {attribute!r}, which cannot be stored between rounds; "
            "expected float32 arrays, dicts or lists of them, an ArrayRecord, or what JSON holds"
        )
    for part in stored[1]:
        if part.dtype != np.float32:
            raise UserError(
                f"strategy.name = {name!r} keeps {part.dtype} in its attribute {attribute!r}, and only float32 is stored between rounds"
            )
    return stored


def _is_json(value: Any) -> bool:
    """Whether JSON gives the same value back."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


_READ: dict[str, Callable[[Mapping[str, Any], list[np.ndarray]], Any]] = {
    "array": lambda document, parts: parts[0],
    "scalar": lambda document, parts: np.dtype(document["dtype"]).type(document["value"]),
    "record": lambda document, parts: ArrayRecord(
        {key: Array(part) for key, part in zip(document["keys"], parts, strict=True)}
    ),
    "dict": lambda document, parts: dict(zip(document["keys"], parts, strict=True)),
    "list": lambda document, parts: parts,
    "json": lambda document, parts: document["value"],
}
