"""Parses untrusted JSON into frozen dataclasses.

An unknown key, a missing key or a value of another type is an error, and its message names the place (`golden.lr`)
and what is expected there. `read` lists the supported types. On the wire, where a newer peer may send more keys,
unknown keys are ignored (`parse_message`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class InvalidDocument(ValueError):
    """The document does not have the expected form; the message says where."""


def loads(text: bytes, place: str) -> object:
    """Parses JSON. A duplicate key is an error: two readers might see two documents.

    Raises:
        InvalidDocument: not UTF-8, not JSON, nested too deep, a number with thousands of digits, or a duplicate key.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidDocument(f"{place} is not JSON: {error}"[:300]) from None


def parse(kind: type[T], document: object, place: str) -> T:
    """The document as a `kind`, a dataclass of JSON types. `place` names it in errors.

    Raises:
        InvalidDocument: naming the first wrong place, and what was expected there.
    """
    parsed: T = read(kind, document, place)
    return parsed


def parse_message(kind: type[T], document: object, place: str) -> T:
    """As `parse`, but ignores unknown keys: the other side may be newer."""
    parsed: T = read(kind, document, place, newer=True)
    return parsed


def read(kind: Any, value: object, place: str, *, newer: bool = False) -> Any:
    """One value: a dataclass, tuple[X, …], Mapping[str, X], Literal, X | None, str, int, float, bool, Path or Any."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, place, newer)
    if origin in (UnionType, Union):
        return _optional(kind, value, place, newer)
    if origin is tuple:
        return _tuple(kind, value, place, newer)
    if origin is Literal:
        if value not in get_args(kind) or isinstance(value, bool):
            raise InvalidDocument(
                f"{place} is {abbreviate(value)}, expected {' or '.join(map(repr, get_args(kind)))}"
            )
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
    """Whether the text can be stored and sent: JSON can also encode NUL and lone surrogates, which cannot."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def abbreviate(value: object) -> str:
    """The value's representation, abbreviated: the value may have a megabyte."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str, most: int = 500) -> str:
    """The text made safe to print: one line of at most `most` characters.

    Text from another machine ends up on terminals and in messages to the service manager, where a control character
    or a newline would be a command.
    """
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(letter if letter.isprintable() else " " for letter in cut)


def printable_lines(text: str, most: int = 500) -> str:
    """As `printable`, line by line: for our own messages that quote foreign text."""
    return "\n".join(printable(line, most) for line in text.split("\n"))


def require_bounded(message: T, place: str, *, most_characters: int = 200, most_entries: int = 256) -> T:
    """The message, if its texts and lists are within the limits.

    A field may allow more (`metadata={"most": characters}`); a field for people (`metadata={"for_people": True}`) is cut
    and made printable instead of refused.

    Raises:
        InvalidDocument: naming the first place that is too long.
    """
    bounds = _Bounds(most_characters, most_entries)
    bounded: T = _bounded(message, place, bounds)
    return bounded


@dataclass(frozen=True)
class _Bounds:
    characters: int
    entries: int
    for_people: bool = False


def _bounded(value: Any, place: str, bounds: _Bounds) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        bounded = {}
        for each in fields(value):
            own = _Bounds(
                each.metadata.get("most", bounds.characters),
                bounds.entries,
                each.metadata.get("for_people", False),
            )
            bounded[each.name] = _bounded(getattr(value, each.name), f"{place}.{each.name}", own)
        return type(value)(**bounded)
    if isinstance(value, (Mapping, tuple)):
        if len(value) > bounds.entries:
            raise InvalidDocument(f"{place} has {len(value)} entries, expected {bounds.entries} at most")
        if isinstance(value, tuple):
            return tuple(_bounded(item, f"{place}[{at}]", bounds) for at, item in enumerate(value))
        return {
            _bounded(key, f"{place}: key", bounds): _bounded(item, f"{place}[{abbreviate(key)}]", bounds)
            for key, item in value.items()
        }
    if not isinstance(value, str):
        return value
    if bounds.for_people:
        return printable(value)
    if len(value) > bounds.characters:
        raise InvalidDocument(f"{place} has {len(value)} characters, expected {bounds.characters} at most")
    return value


def _dataclass(kind: type, value: object, place: str, newer: bool) -> Any:
    document = _object(value, place)
    known = {field.name: field for field in fields(kind)}
    kinds = _kinds_of(kind)
    unknown = [key for key in document if key not in known]
    if unknown and not newer:
        raise InvalidDocument(
            f"{place} has an unknown key {abbreviate(unknown[0])}; known: {', '.join(known)}"
        )
    for name, field in known.items():
        if name not in document and field.default is MISSING and field.default_factory is MISSING:
            raise InvalidDocument(f"{place} lacks the key {name!r}")
    return kind(
        **{
            key: read(kinds[key], item, f"{place}.{key}", newer=newer)
            for key, item in document.items()
            if key in known
        }
    )


@cache
def _kinds_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields; resolving them takes much longer than reading a message."""
    return get_type_hints(kind)


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidDocument(f"{place} is {abbreviate(value)}, expected an object")
    return value


def _optional(kind: Any, value: object, place: str, newer: bool) -> Any:
    if value is None:
        return None
    (present,) = (part for part in get_args(kind) if part is not NoneType)
    return read(present, value, place, newer=newer)


def _tuple(kind: Any, value: object, place: str, newer: bool) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidDocument(f"{place} is {abbreviate(value)}, expected a list")
    item_kind = get_args(kind)[0]
    if item_kind is float and all(type(item) is float and math.isfinite(item) for item in value):
        return tuple(value)  # manifests hold thousands
    return tuple(read(item_kind, item, f"{place}[{i}]", newer=newer) for i, item in enumerate(value))


def _scalar(kind: Any, value: object, place: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = _as_float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidDocument(f"{place} is {abbreviate(value)}, expected {_TYPE_NAMES[kind]}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidDocument(f"{place} is {abbreviate(value)}, expected a whole number of 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidDocument(f"{place} is {value}, expected a finite number")
    if isinstance(value, str) and not is_text(value):
        raise InvalidDocument(
            f"{place} is {abbreviate(value)}, expected text without NUL and lone surrogates"
        )
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
            raise ValueError(f"the key {abbreviate(key)} occurs twice")
        document[key] = value
    return document


_TYPE_NAMES = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}
