"""JSON into frozen dataclasses, taking nothing on trust.

Documents come from outside: a key too many, a key too few or a value of another kind is refused, and the
message names the place (`golden.lr`) and what belongs there. Which kinds are understood is listed in
`read`; that is all that documents of ours hold. On the wire, where a newer peer may know more keys, those
are passed over (`parse_message`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Unfit(ValueError):
    """The document does not have the form asked for; the message says where."""


def loads(text: bytes, place: str) -> object:
    """JSON as a document. A key that comes twice is refused: two readers might see two documents.

    Raises:
        Unfit: not UTF-8, not JSON, too deep, a number of thousands of digits, or a key twice.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Unfit(f"{place} is not JSON: {error}"[:300]) from None


def parse(kind: type[T], document: object, place: str) -> T:
    """The document as a `kind`, a dataclass of JSON kinds. `place` names it in errors.

    Raises:
        Unfit: naming the first place that does not fit, and what was expected there.
    """
    parsed: T = read(kind, document, place)
    return parsed


def parse_message(kind: type[T], document: object, place: str) -> T:
    """As `parse`, but keys unknown here are passed over: the other side may be newer."""
    parsed: T = read(kind, document, place, newer=True)
    return parsed


def read(kind: Any, value: object, place: str, *, newer: bool = False) -> Any:
    """One value: a dataclass, tuple[X, …], Mapping[str, X], Literal, X | None, str, int, float, bool or Any."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, place, newer)
    if origin in (UnionType, Union):
        return _optional(kind, value, place, newer)
    if origin is tuple:
        return _tuple(kind, value, place, newer)
    if origin is Literal:
        if value not in get_args(kind) or isinstance(value, bool):
            raise Unfit(f"{place} is {shown(value)}, expected {' or '.join(map(repr, get_args(kind)))}")
        return value
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {
            _scalar(str, key, f"{place}: key"): read(
                get_args(kind)[1], item, f"{place}[{key!r}]", newer=newer
            )
            for key, item in _object(value, place).items()
        }
    return _scalar(kind, value, place)


def is_text(value: str) -> bool:
    """Whether it can be stored and sent on: JSON also spells NUL, and halves of characters, which cannot."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def shown(value: object) -> str:
    """The value, cut short: what arrived may be a megabyte."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str, most: int = 500) -> str:
    """The text for a person to read, on one line, cut at `most` characters.

    What another machine says ends up on terminals and in messages to the service manager, where a control
    character or a new line would be a command.
    """
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(letter if letter.isprintable() else " " for letter in cut)


def _dataclass(kind: type, value: object, place: str, newer: bool) -> Any:
    document = _object(value, place)
    known = {field.name: field for field in fields(kind)}
    kinds = _kinds_of(kind)
    unknown = [key for key in document if key not in known]
    if unknown and not newer:
        raise Unfit(f"{place} has an unknown key {shown(unknown[0])}; known: {', '.join(known)}")
    for name, field in known.items():
        if name not in document and field.default is MISSING and field.default_factory is MISSING:
            raise Unfit(f"{place} lacks the key {name!r}")
    return kind(
        **{
            key: read(kinds[key], item, f"{place}.{key}", newer=newer)
            for key, item in document.items()
            if key in known
        }
    )


@cache
def _kinds_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields; working them out takes many times as long as reading a message."""
    return get_type_hints(kind)


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unfit(f"{place} is {shown(value)}, expected an object")
    return value


def _optional(kind: Any, value: object, place: str, newer: bool) -> Any:
    if value is None:
        return None
    (some,) = (part for part in get_args(kind) if part is not NoneType)
    return read(some, value, place, newer=newer)


def _tuple(kind: Any, value: object, place: str, newer: bool) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise Unfit(f"{place} is {shown(value)}, expected a list")
    return tuple(read(get_args(kind)[0], item, f"{place}[{i}]", newer=newer) for i, item in enumerate(value))


def _scalar(kind: Any, value: object, place: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = _as_float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Unfit(f"{place} is {shown(value)}, expected {_WORDS[kind]}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Unfit(f"{place} is {shown(value)}, expected a whole number of 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise Unfit(f"{place} is {value}, expected a finite number")
    if isinstance(value, str) and not is_text(value):
        raise Unfit(f"{place} is {shown(value)}, expected text without NUL and halves of characters")
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"the key {shown(key)} comes twice")
        document[key] = value
    return document


_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
