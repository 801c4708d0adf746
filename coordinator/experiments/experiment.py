"""The experiment file: one TOML document that runs in simulation and on a real fleet.

`load(path, sets)` reads the file, applies `--set`, checks everything and reports every bad value at once.
The result is complete: every key has a value, so `to_toml` records the whole experiment.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments.defaults import with_defaults
from coordinator.experiments.schema import Experiment, FleetKind
from coordinator.experiments.validation import find_problems, to_user_error, validate

_AFFECTED_KEYS = {
    "data.dataset": ("data", "model", "federation.clients"),
    "data.partition": ("federation.clients",),
    "data.site": ("federation.clients",),
    "model.name": ("model", "federation.runtimes"),
    "strategy.name": ("strategy",),
}
"""Keys whose default or meaning depends on a key."""

LIMIT_BYTES = 4 * 2**20
"""Largest experiment file that is read."""


def load(path: Path | None, sets: Iterable[str] = ()) -> Experiment:
    """The experiment of a file (or all defaults) after `--set key=value` settings.

    Raises:
        UserError: naming the file, every bad key with its value, and what was expected.
    """
    document = apply_settings(read_toml(path) if path else {}, sets)
    return resolve(document, str(path) if path else "experiment")


def apply_settings(document: dict[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """Applies `--set key=value` settings to the document in place and returns it."""
    for setting in sets:
        _apply(document, setting)
    return document


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dicts."""
    try:
        with path.open("rb") as file:  # may be a pipe, <(…)
            content = file.read(LIMIT_BYTES + 1)
        if len(content) > LIMIT_BYTES:
            raise UserError(f"{path}: has more than {LIMIT_BYTES:,} bytes; expected an experiment in TOML")
        return parse_toml(content.decode("utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such experiment file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """TOML text as nested dicts."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source}: not valid TOML: {error}") from None


def resolve(
    document: Mapping[str, Any], source: str, fleet: FleetKind = "simulated", *, stored: bool = False
) -> Experiment:
    """A checked experiment with every default filled in.

    On a fleet of devices `data.dataset` may be any name that the devices know, if the file describes its rows.
    `stored`: of a run that began earlier; how its table is read stays as it was, whatever the default is now.

    Raises:
        UserError: listing every problem at once; messages call the document `source`.
    """

    def complete(valid: Experiment) -> Experiment:
        return with_defaults(valid, fleet, stored=stored)

    experiment, problems = validate(
        Experiment, document, lambda valid: find_problems(complete(valid), fleet), _AFFECTED_KEYS
    )
    if experiment is None or problems:
        raise to_user_error(source, problems)
    return complete(experiment)


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
