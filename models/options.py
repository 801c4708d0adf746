"""Options as dataclasses: fields with ranges, read from a table with a clear error for the first wrong value.

Standard library only, for jobs and for datacenter machines without other packages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from edge_client.wire import strict
from edge_client.wire.strict import InvalidDocument, UnknownKey
from edge_client.wire.strict import bounded as bounded
from strategies.suggestions import suggest

Options = TypeVar("Options")

_RULES = strict.Rules(low=0)
"""Numbers of fields without a range of their own are 0 and above."""


class JobError(ValueError):
    """The job file, or a file it names, is wrong; the message says where and what was expected."""


class OptionError(JobError):
    """An option is unknown or has an invalid value; the message says which and what was expected."""


def read(kind: type[Options], table: object, where: str) -> Options:
    """The table as the dataclass `kind`, with its defaults for missing keys.

    Raises:
        OptionError: its message starts with `where`.
    """
    try:
        return strict.parse(kind, table, where, _RULES)
    except InvalidDocument as error:
        raise OptionError(_message(error)) from None


def problems(kind: type[Any], table: Mapping[str, Any], where: str) -> list[str]:
    """Every problem of the keys and values of `table`, one sentence each."""
    listed = []
    for name, value in table.items():
        try:
            strict.read_field(kind, name, value, where, _RULES)
        except InvalidDocument as error:
            listed.append(_message(error))
    return listed


def only(value: object, known: Collection[str], where: str) -> dict[str, Any]:
    """`value` if it is a table with only `known` keys.

    Raises:
        OptionError: naming an unknown key and the nearest known one, or it is not a table.
    """
    if not isinstance(value, dict):
        raise OptionError(f"{where} is {value!r}, expected an object")
    try:
        strict.require_known(sorted(value), known, where)
    except InvalidDocument as error:
        raise OptionError(_message(error)) from None
    return value


def _message(error: InvalidDocument) -> str:
    if isinstance(error, UnknownKey):
        hint = suggest(error.key, error.known)
        return str(UnknownKey(error.place, error.key, error.known, hint))
    return str(error)
