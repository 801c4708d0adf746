"""The `pyproject.toml` of a Flower app: its components, its run configuration, and the number of clients it asks for.

Nothing of the app is imported here. The run configuration is merged as `flwr run` merges it: nested tables become dotted
keys, and an override may only change a key that the app has.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.json_values import flatten
from strategies.suggestions import suggest

FILE = "pyproject.toml"
DEFAULT_CLIENTS = 2
"""Clients of an app that names no number of them, as in Flower since 1.32."""

Config = dict[str, bool | int | float | str]

_COMPONENTS = "tool.flwr.app.components"
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True)
class FlowerApp:
    """A Flower app in a folder.

    Attributes:
        server, client: where its ServerApp and its ClientApp are, as `module:attribute`.
        config: its run configuration, overrides applied; nested keys are joined with dots.
        clients: the number that its default federation asks for.
    """

    folder: Path
    name: str
    server: str
    client: str
    config: Config
    clients: int


def read(folder: Path, overrides: Sequence[str] = ()) -> FlowerApp:
    """The app in `folder`. `overrides`: each `key=value …` as of `flwr run --run-config`, or one path of a TOML file.

    Raises:
        UserError: naming the file, every bad key with its value, and what was expected.
    """
    path = folder / FILE
    document = _read_toml(path, f"--flower-app {folder}: there is no {FILE} in this folder")
    problems = list(_problems(document))
    if problems:
        raise UserError(_list_problems(path, problems))
    app = document["tool"]["flwr"]["app"]
    name = _table(document, "project").get("name")
    return FlowerApp(
        folder=folder.resolve(),
        name=name if isinstance(name, str) and name else folder.resolve().name,
        server=app["components"]["serverapp"],
        client=app["components"]["clientapp"],
        config=_merge(flatten(app.get("config", {})), _parse_overrides(overrides), path),
        clients=_declared_clients(document) or DEFAULT_CLIENTS,
    )


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each problem."""
    components = _table(document, _COMPONENTS)
    if not _table(document, "tool.flwr.app"):
        yield "has no table [tool.flwr.app]; this is no Flower app"
        return
    if "agentapp" in components:
        yield f"{_COMPONENTS}.agentapp: Fedloop runs apps of a serverapp and a clientapp, not agents"
        return
    for key in ("serverapp", "clientapp"):
        value = components.get(key)
        if value is None:
            yield f'{_COMPONENTS}.{key} is missing; expected "module:attribute", such as "mine.{key[:6]}_app:app"'
        elif not isinstance(value, str) or not _REFERENCE.fullmatch(value):
            yield f'{_COMPONENTS}.{key} = {value!r}: expected "module:attribute", such as "mine.{key[:6]}_app:app"'
    config = document["tool"]["flwr"]["app"].get("config", {})
    if not isinstance(config, Mapping):
        yield f"tool.flwr.app.config = {config!r}: expected a table"
    else:
        yield from (
            f"tool.flwr.app.config.{key} = {value!r}: expected a bool, a number, a string or a table of these"
            for key, value in flatten(config).items()
            if not isinstance(value, _SCALARS)
        )
    clients = _declared_clients(document)
    if clients is not None and (not isinstance(clients, int) or isinstance(clients, bool) or clients < 1):
        federation = _table(document, "tool.flwr.federations")["default"]
        yield (
            f"tool.flwr.federations.{federation}.options.num-supernodes = {clients!r}: expected a whole number from 1"
        )


def _declared_clients(document: Mapping[str, Any]) -> Any:
    """`num-supernodes` of the default federation; None if there is none."""
    default = _table(document, "tool.flwr.federations").get("default")
    return _table(document, f"tool.flwr.federations.{default}.options").get("num-supernodes")


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table by its dotted name; empty where there is none."""
    inner: Any = document
    for part in name.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _parse_overrides(overrides: Sequence[str]) -> Config:
    if any(each.endswith(".toml") for each in overrides):
        if len(overrides) > 1:
            raise UserError("--run-config: expected either one TOML file or key=value pairs, not both")
        path = Path(overrides[0]).expanduser()
        return flatten(_read_toml(path, f"--run-config {path}: no such file"))
    parsed: Config = {}
    for text in overrides:
        rest = _PAIR.sub("", text).split()
        if rest:
            raise UserError(
                f"--run-config {text!r}: {rest[0]!r} is not of the form key=value; pairs stand apart, without spaces around ="
            )
        for key, value in _PAIR.findall(text):
            parsed |= _parse_pair(key, value)
    return parsed


def _parse_pair(key: str, value: str) -> Config:
    try:
        return flatten(tomllib.loads(f"{key} = {value}"))
    except tomllib.TOMLDecodeError:
        raise UserError(
            f"--run-config {key}={value}: the value is not TOML; expected true, 5, 0.1 or, with its quotes, {key}='\"text\"'"
        ) from None


def _merge(config: Config, overrides: Config, path: Path) -> Config:
    """The configuration after the overrides, which may not add a key."""
    for key, value in overrides.items():
        if key not in config:
            hint = suggest(key, config) or f"; its keys are {', '.join(config) or 'none'}"
            raise UserError(f"--run-config {key}: [tool.flwr.app.config] of {path} has no such key{hint}")
        if not isinstance(value, _SCALARS):
            raise UserError(f"--run-config {key}={value!r}: expected a bool, a number or a string")
    return config | overrides


def _read_toml(path: Path, missing: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(missing) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _list_problems(path: Path, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{path}: {problems[0]}"
    return "\n  - ".join([f"{path}: {len(problems)} problems", *problems])
