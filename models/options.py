"""Options as dataclasses: fields with ranges, read from a table with a clear error for the first wrong value.

Standard library only, for jobs and for datacenter machines without other packages.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

Options = TypeVar("Options")


class OptionError(ValueError):
    """An option is unknown or has an invalid value; the message says which and what was expected."""


def bounded(default: float, least: float, most: float) -> Any:
    """A dataclass field with a default and an inclusive range that `read` checks."""
    return dataclasses.field(default=default, metadata={"least": least, "most": most})


def read(kind: type[Options], table: object, where: str) -> Options:
    """The table as the dataclass `kind`, with its defaults for missing keys.

    Fields are int and float from `bounded`, bool, str, and Literal.

    Raises:
        OptionError: its message starts with `where`.
    """
    known = only(table, tuple(typing.get_type_hints(kind)), where)
    if wrong := problems(kind, known, where):
        raise OptionError(wrong[0])
    return kind(**known)


def problems(kind: type[Any], table: Mapping[str, Any], where: str) -> list[str]:
    """Every problem of the keys and values of `table`, one sentence each."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    listed = []
    for name, value in table.items():
        if name not in fields:
            listed.append(_unknown(name, tuple(fields), where))
        elif problem := _problem(value, hints[name], fields[name].metadata):
            listed.append(f"{where}.{name} is {value!r}, expected {problem}")
    return listed


def only(value: object, known: tuple[str, ...], where: str) -> dict[str, Any]:
    """`value` if it is a table with only `known` keys.

    Raises:
        OptionError: naming an unknown key and the nearest known one, or it is not a table.
    """
    if not isinstance(value, dict):
        raise OptionError(f"{where} is {value!r}, expected an object")
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise OptionError(_unknown(unknown[0], known, where))
    return value


def _unknown(key: str, known: tuple[str, ...], where: str) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"{where} has the unknown key {key!r}{hint}; known: {', '.join(known)}"


def _problem(value: object, hint: Any, bounds: Mapping[str, Any]) -> str:
    """The expected value if `value` is invalid, otherwise empty."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return "" if value in choices else "one of " + ", ".join(map(repr, choices))
    if hint is bool:
        return "" if isinstance(value, bool) else "true or false"
    if hint is str:
        return "" if isinstance(value, str) else "text"
    noun = "a whole number" if hint is int else "a number"
    expected = f"{noun} from {bounds['least']} to {bounds['most']}"
    numeric = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return "" if numeric and bounds["least"] <= value <= bounds["most"] else expected
