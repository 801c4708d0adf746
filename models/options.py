"""Options as dataclasses: fields with ranges, read from a table with a clear error for the first wrong value.

Standard library only, for jobs and for datacenter machines without other packages.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

Options = TypeVar("Options")


class JobError(ValueError):
    """The job file, or a file it names, is wrong; the message says where and what was expected."""


class OptionError(JobError):
    """An option is unknown or has an invalid value; the message says which and what was expected."""


def bounded(default: object, least: float, most: float) -> Any:
    """A dataclass field with a default and an inclusive range that `read` checks, of each value of a tuple."""
    return dataclasses.field(default=default, metadata={"least": least, "most": most})


def read(kind: type[Options], table: object, where: str) -> Options:
    """The table as the dataclass `kind`, with its defaults for missing keys.

    Fields are int and float, from `bounded` or else 0 and above, bool, str, Literal, and of these tuples, dictionaries
    by name and dataclasses.

    Raises:
        OptionError: its message starts with `where`.
    """
    fields, hints = dataclasses.fields(kind), typing.get_type_hints(kind)  # type: ignore[arg-type]
    known = only(table, tuple(hints), where)
    for field in fields:
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in known:
            raise OptionError(f"{where}.{field.name} is missing")
    bounds = {field.name: field.metadata for field in fields}
    return kind(
        **{name: _read(hints[name], value, bounds[name], f"{where}.{name}") for name, value in known.items()}
    )


def problems(kind: type[Any], table: Mapping[str, Any], where: str) -> list[str]:
    """Every problem of the keys and values of `table`, one sentence each."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    listed = []
    for name, value in table.items():
        if name not in fields:
            listed.append(_unknown(name, tuple(fields), where))
            continue
        try:
            _read(hints[name], value, fields[name].metadata, f"{where}.{name}")
        except OptionError as error:
            listed.append(str(error))
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


def _read(hint: Any, value: Any, bounds: Mapping[str, Any], where: str) -> Any:
    """`value` as `hint`: a list becomes a tuple and a table a dataclass."""
    if dataclasses.is_dataclass(hint):
        return read(hint, value, where)  # type: ignore[arg-type]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict and isinstance(value, dict):
        return {name: _read(arguments[1], item, bounds, f"{where}.{name}") for name, item in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        if len(kinds) == len(value):
            pairs = enumerate(zip(kinds, value, strict=True))
            return tuple(_read(each, item, bounds, f"{where}[{index}]") for index, (each, item) in pairs)
    if problem := _problem(value, hint, bounds):
        raise OptionError(f"{where} is {value!r}, expected {problem}")
    return value


def _problem(value: object, hint: Any, bounds: Mapping[str, Any]) -> str:
    """The expected value if `value` is invalid, otherwise empty."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "" if value in choices else "one of " + ", ".join(map(repr, choices))
    if origin is dict:
        return "an object"
    if origin is tuple:
        return "a list" if choices[-1] is ... else f"a list of {len(choices)}"
    if hint is bool:
        return "" if isinstance(value, bool) else "true or false"
    if hint is str:
        return "" if isinstance(value, str) else "text"
    noun = "a whole number" if hint is int else "a number"
    least, most = bounds.get("least", 0), bounds.get("most", math.inf)
    expected = f"{noun} from {least} to {most}" if "most" in bounds else f"{noun} >= {least}"
    numeric = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return "" if numeric and least <= value <= most else expected
