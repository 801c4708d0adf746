"""The reference page of a device's configuration file, from the dataclasses that it fills and their docstrings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import edge_client.data as connectors
from edge_client.config import EdgeConfig, ReleaseOptions, StatisticsOptions
from edge_client.data.csv_file import CsvOptions
from edge_client.data.numpy_file import NumpyOptions
from edge_client.data.options import Options, TableOptions
from edge_client.data.sqlite_query import SqliteOptions
from edge_client.eligibility import Conditions
from edge_client.train.process import Limits

_TABLES = {
    "limits": Limits,
    "conditions": Conditions,
    "releases": ReleaseOptions,
    "statistics": StatisticsOptions,
}
_KINDS = {
    "csv": CsvOptions,
    "parquet": TableOptions,
    "sqlite": SqliteOptions,
    "numpy": NumpyOptions,
    "images": Options,
}


def page() -> str:
    """Every key of the file: its type, default and meaning."""
    lines = [
        "# Keys of a device's configuration",
        "",
        "[The guide](../device-data.md) explains them. `[labels]` has any keys with texts.",
        "",
        "## Top level",
        "",
        *_rows(EdgeConfig, leave_out={*_TABLES, "labels", "data"}),
    ]
    for name, table in _TABLES.items():
        lines += ["", f"## `[{name}]`", "", *_rows(table)]
    lines += ["", "## `[data.NAME]`", "", "`kind` and `path`, and the options of the kind:", ""]
    lines += ["| key | kinds | default | meaning |", "|---|---|---|---|"]
    lines += _data_rows()
    return "\n".join([*lines, ""])


def _rows(table: type, leave_out: set[str] | None = None) -> Iterator[str]:
    meanings, types = _meanings(table), get_type_hints(table)
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for field in dataclasses.fields(table):
        if field.name not in (leave_out or ()):
            meaning = meanings.get(field.name, "")
            yield f"| `{field.name}` | {_kind(types[field.name])} | {_default(field)} | {meaning} |"


def _data_rows() -> Iterator[str]:
    meanings = _listed(connectors.__doc__ or "")
    keys: dict[str, list[str]] = {}
    defaults: dict[str, str] = {}
    for kind, options in _KINDS.items():
        meanings |= _meanings(options)
        for field in dataclasses.fields(options):
            keys.setdefault(field.name, []).append(kind)
            defaults.setdefault(field.name, _default(field))
    for key, kinds in keys.items():
        named = "all" if len(kinds) == len(_KINDS) else ", ".join(kinds)
        yield f"| `{key}` | {named} | {defaults[key]} | {meanings.get(key, '')} |"


def _meanings(table: type) -> dict[str, str]:
    """Field -> its meaning, of the section `Attributes` in the docstring."""
    found: dict[str, str] = {}
    for base in reversed(table.__mro__):
        section = re.search(r"Attributes:\n(.*?)(?:\n\s*\n|\Z)", base.__doc__ or "", re.DOTALL)
        names = ""
        for line in (section.group(1) if section else "").splitlines():
            if entry := re.match(r"\s{8}([\w, ]+): (.+)", line):
                names = entry.group(1)
                found |= dict.fromkeys(names.split(", "), entry.group(2))
            elif names and line.strip():
                found |= {name: f"{found[name]} {line.strip()}" for name in names.split(", ")}
    return {name: _sentence(text) for name, text in found.items()}


def _listed(docstring: str) -> dict[str, str]:
    """Name -> meaning, of a list in two columns."""
    found: dict[str, str] = {}
    name = ""
    for line in docstring.splitlines():
        if entry := re.match(r"    (\w+) +(\S.*)", line) if line[:17].strip().isidentifier() else None:
            name = entry.group(1)
            found[name] = entry.group(2)
        elif name and line.startswith(" " * 12):
            found[name] += f" {line.strip()}"
        else:
            name = ""
    return {name: _sentence(text) for name, text in found.items()}


def _sentence(text: str) -> str:
    return text.rstrip(".").replace("|", "\\|")


def _kind(annotation: Any) -> str:
    text = str(annotation)
    for pattern, plain in (
        ("bool", "`true` or `false`"),
        ("tuple", "list of texts"),
        ("int", "integer"),
        ("float", "number"),
        ("Path", "path"),
    ):
        if pattern in text:
            return plain
    return "text"


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value is dataclasses.MISSING or value in (None, "", ()):
        return ""
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
