"""Parses untrusted JSON into frozen dataclasses.

An unknown key, a missing key or a value of another type is an error, and its message names the place (`golden.lr`)
and what is expected there. `read` lists the supported types. On the wire, where a newer peer may send more keys,
unknown keys are ignored (`parse_message`). A field made by `bounded` has a range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class InvalidDocument(ValueError):
    """The document does not have the expected form; the message says where."""


class UnknownKey(InvalidDocument):
    """The object at `place` has a key that is not among the `known` ones. `hint` follows the key in the message."""

    def __init__(self, place: str, key: str, known: Collection[str], hint: str = "") -> None:
        super().__init__(f"{place} has the unknown key {abbreviate(key)}{hint}; known: {', '.join(known)}")
        self.place, self.key, self.known = place, key, known


@dataclass(frozen=True)
class Rules:
    """How a document is read.

    Attributes:
        newer: ignore unknown keys, because the other side may be newer.
        low, high: inclusive range of numbers, except in fields that have their own.
    """

    newer: bool = False
    low: float = -math.inf
    high: float = math.inf


DEFAULT_RULES = Rules()


def bounded(default: object, low: float, high: float) -> Any:
    """A dataclass field with a default and an inclusive range, of each number if it holds several."""
    return field(default=default, metadata={"range": (low, high)})


def loads(text: bytes, place: str) -> object:
    """Parses JSON. A duplicate key is an error: two readers might see two documents.

    Raises:
        InvalidDocument: not UTF-8, not JSON, nested too deep, a number with thousands of digits, or a duplicate key.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidDocument(f"{place} is not JSON: {error}"[:300]) from None


def parse(kind: type[T], document: object, place: str, rules: Rules = DEFAULT_RULES) -> T:
    """The document as a `kind`, a dataclass of JSON types. `place` names it in errors.

    Raises:
        InvalidDocument: naming the first wrong place, and what was expected there.
    """
    parsed: T = read(kind, document, place, rules)
    return parsed


def parse_message(kind: type[T], document: object, place: str) -> T:
    """As `parse`, but ignores unknown keys: the other side may be newer."""
    return parse(kind, document, place, Rules(newer=True))


def read(kind: Any, value: object, place: str, rules: Rules = DEFAULT_RULES) -> Any:
    """One value: a dataclass, tuple, Mapping[str, X], Literal, X | None, str, int, float, bool, Path or Any."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, place, rules)
    if origin in (UnionType, Union):
        return _optional(kind, value, place, rules)
    if origin is tuple:
        return _tuple(kind, value, place, rules)
    if origin is Literal:
        return _choice(get_args(kind), value, place)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {
            _scalar(str, key, f"{place}: key", rules): read(
                get_args(kind)[1], item, f"{place}[{key!r}]", rules
            )
            for key, item in _object(value, place).items()
        }
    return _scalar(kind, value, place, rules)


def read_field(kind: type, name: str, value: object, place: str, rules: Rules = DEFAULT_RULES) -> Any:
    """The value of one field of the dataclass `kind` at `place`.

    Raises:
        InvalidDocument: `kind` has no such field, or the value is wrong.
    """
    known = _fields_of(kind)
    require_known([name], known, place)
    low, high = known[name].metadata.get("range", (rules.low, rules.high))
    if (low, high) != (rules.low, rules.high):
        rules = replace(rules, low=low, high=high)
    return read(_kinds_of(kind)[name], value, f"{place}.{name}", rules)


def require_known(keys: Iterable[str], known: Collection[str], place: str) -> None:
    """Raises: UnknownKey: naming the first key that is not known."""
    for key in keys:
        if key not in known:
            raise UnknownKey(place, key, known)


def is_text(value: str) -> bool:
    """Whether the text can be stored and sent: JSON can also encode NUL and lone surrogates, which cannot."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def abbreviate(value: object) -> str:
    """The value's representation, abbreviated: the value may have a megabyte."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str, max_characters: int = 500) -> str:
    """The text made safe to print: one line of at most `max_characters`.

    Text from another machine ends up on terminals and in messages to the service manager, where a control character
    or a newline would be a command.
    """
    cut = text if len(text) <= max_characters else text[: max_characters - 1] + "…"
    return "".join(letter if letter.isprintable() else " " for letter in cut)


def printable_lines(text: str, max_characters: int = 500) -> str:
    """As `printable`, line by line: for our own messages that quote foreign text."""
    return "\n".join(printable(line, max_characters) for line in text.split("\n"))


def require_bounded(message: T, place: str, *, max_characters: int = 200, max_entries: int = 256) -> T:
    """The message, if its texts and lists are within the limits.

    A field may allow more (`metadata={"max_characters": characters}`); a field for people (`metadata={"for_people": True}`) is cut
    and made printable instead of refused.

    Raises:
        InvalidDocument: naming the first place that is too long.
    """
    bounds = _Bounds(max_characters, max_entries)
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
                each.metadata.get("max_characters", bounds.characters),
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


def _dataclass(kind: type, value: object, place: str, rules: Rules) -> Any:
    document = _object(value, place)
    known = _fields_of(kind)
    if not rules.newer:
        require_known(document, known, place)
    for name, each in known.items():
        if name not in document and each.default is MISSING and each.default_factory is MISSING:
            raise InvalidDocument(f"{place} lacks the key {name!r}")
    return kind(
        **{key: read_field(kind, key, item, place, rules) for key, item in document.items() if key in known}
    )


@cache
def _fields_of(kind: type) -> dict[str, Field[Any]]:
    return {each.name: each for each in fields(kind)}


@cache
def _kinds_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields; resolving them takes much longer than reading a message."""
    return get_type_hints(kind)


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidDocument(f"{place} is {abbreviate(value)}, expected an object")
    return value


def _optional(kind: Any, value: object, place: str, rules: Rules) -> Any:
    if value is None:
        return None
    (present,) = (part for part in get_args(kind) if part is not NoneType)
    return read(present, value, place, rules)


def _tuple(kind: Any, value: object, place: str, rules: Rules) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidDocument(f"{place} is {abbreviate(value)}, expected a list")
    item_kinds = get_args(kind)
    if item_kinds == (float, ...) and rules.low == -math.inf and all(map(_is_finite_float, value)):
        return tuple(value)  # manifests hold thousands
    if item_kinds[-1] is Ellipsis:
        item_kinds = (item_kinds[0],) * len(value)
    elif len(item_kinds) != len(value):
        raise InvalidDocument(f"{place} is {abbreviate(value)}, expected a list of {len(item_kinds)}")
    return tuple(
        read(kind, item, f"{place}[{i}]", rules)
        for i, (kind, item) in enumerate(zip(item_kinds, value, strict=True))
    )


def _choice(choices: tuple[object, ...], value: object, place: str) -> object:
    # True equals 1, but is no choice of a number.
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    expected = repr(choices[0]) if len(choices) == 1 else f"one of {', '.join(map(repr, choices))}"
    raise InvalidDocument(f"{place} is {abbreviate(value)}, expected {expected}")


def _scalar(kind: Any, value: object, place: str, rules: Rules) -> Any:
    given = value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = _as_float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidDocument(f"{place} is {abbreviate(value)}, expected {_expected(kind, rules)}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidDocument(f"{place} is {abbreviate(value)}, expected a whole number of 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidDocument(f"{place} is {value}, expected a finite number")
    if isinstance(value, str) and not is_text(value):
        raise InvalidDocument(
            f"{place} is {abbreviate(value)}, expected text without NUL and lone surrogates"
        )
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not rules.low <= value <= rules.high
    ):
        raise InvalidDocument(f"{place} is {abbreviate(given)}, expected {_expected(kind, rules)}")
    return value


def _expected(kind: Any, rules: Rules) -> str:
    name = _TYPE_NAMES[kind]
    if kind not in (int, float) or rules.low == -math.inf:
        return name
    return f"{name} >= {rules.low}" if rules.high == math.inf else f"{name} from {rules.low} to {rules.high}"


def _is_finite_float(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


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
