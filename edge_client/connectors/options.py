"""Options of a data set: each kind's own dataclass, filled from the configuration or refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from edge_client.connectors.connector import DataConfig, DataProblem
from edge_client.wire.strict import Unfit, read


@dataclass(frozen=True)
class Options:
    """What all kinds share; see `edge_client.connectors` for the meanings."""

    classes: tuple[str, ...] = ()
    dtype: Literal["float32", "int32"] | None = None
    shape: tuple[int, ...] = ()
    scale: float | None = None
    standardise: Literal["none", "local"] = "none"
    held_out: float | None = None
    test_path: str | None = None


@dataclass(frozen=True)
class TableOptions(Options):
    """Of tables. `label` must be given; `features`: all other columns unless said."""

    label: str = ""
    features: tuple[str, ...] = ()
    split: str | None = None


HELD_OUT = 0.2

O = TypeVar("O", bound=Options)  # noqa: E741 - the options' own kind


def read_options(kind: type[O], config: DataConfig) -> O:
    """The options of `config` as a `kind`.

    Raises:
        DataProblem: one is unknown, of another kind or makes no sense.
    """
    kinds = get_type_hints(kind)
    given: dict[str, Any] = {}
    for name, value in config.options.items():
        if name not in kinds:
            raise DataProblem(f"{config.kind} data has no option {name!r}{_nearest(name, kinds)}")
        try:
            given[name] = read(kinds[name], _listed(value), f"option {name}")
        except Unfit as error:
            raise DataProblem(f"{config.kind} data: {error}") from None
    options = kind(**given)
    _require_sense(options, config)
    return options


def require_path(config: DataConfig) -> Path:
    """Raises DataProblem where no path is given."""
    if config.path is None:
        raise DataProblem(f"{config.kind} data needs `path`, the file or folder to read")
    return config.path


def beside(path: Path, other: str) -> Path:
    """A further file that the options name: as written, or beside `path` where it is relative."""
    return path.parent / Path(other).expanduser()


def read_only_problem(path: Path, error: OSError) -> DataProblem:
    """A file that cannot be read, in words."""
    if isinstance(error, FileNotFoundError):
        return DataProblem(f"{path}: no such file; `path` of the data set names it")
    return DataProblem(f"{path}: cannot be read: {error.strerror or error}")


def _require_sense(options: Options, config: DataConfig) -> None:
    names = [name for name in ("held_out", "test_path", "split") if getattr(options, name, None) is not None]
    repeated = sorted({name for name in options.classes if options.classes.count(name) > 1})
    checks = (
        (len(names) < 2, f"options {' and '.join(names)} contradict each other; give one of them"),
        (not repeated, f"option classes names {repeated[:1]} twice"),
        (
            all(extent > 0 for extent in options.shape),
            f"option shape is {list(options.shape)}, expected extents > 0",
        ),
        (
            options.held_out is None or 0 <= options.held_out < 1,
            f"option held_out is {options.held_out}, expected 0 or more and below 1",
        ),
        (
            options.dtype != "int32" or options.scale is None,
            "option scale is for float32 data, dtype is int32",
        ),
        (
            options.dtype != "int32" or options.standardise == "none",
            "option standardise is for float32 data, dtype is int32",
        ),
    )
    for holds, words in checks:
        if not holds:
            raise DataProblem(f"{config.kind} data: {words}")


def _listed(value: object) -> object:
    """Tuples come from Python, lists from a file."""
    return list(value) if isinstance(value, tuple) else value


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]!r}?" if close else f"; it has: {', '.join(known)}"
