"""The option `--set key=value`, which changes one key of a document."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from coordinator.errors import UserError


def apply_settings(document: dict[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """Applies `--set key=value` settings to the document in place and returns it."""
    for setting in sets:
        _apply(document, setting)
    return document


def _apply(document: dict[str, Any], setting: str) -> None:
    """Applies one `--set key=value`. The value is TOML if it parses as TOML, else a string; a table replaces the old one."""
    key, equals, text = setting.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise UserError(f"--set {setting!r} is not of the form key=value, such as --set local.lr=0.1")
    try:
        values = tomllib.loads(f"value = {text.strip()}")
    except tomllib.TOMLDecodeError:
        values = {}
    # A text of several lines may parse as several keys; then it is a string.
    value = values["value"] if values.keys() == {"value"} else text
    *tables, last = key.strip().split(".")
    for table in tables:
        inner = document.setdefault(table, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {setting!r}: {table} is a value, not a table")
        document = inner
    document[last] = value
