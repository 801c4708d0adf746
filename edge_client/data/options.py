"""Options of a data set: each kind's own dataclass, filled from the configuration or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from edge_client.data.connector import DataConfig, DataProblem
from edge_client.wire.strict import InvalidDocument, read
from strategies.suggestions import suggest


@dataclass(frozen=True)
class Options:
    """Options that all kinds share; see `edge_client.data` for the meanings."""

    classes: tuple[str, ...] = ()
    dtype: Literal["float32", "int32"] | None = None
    shape: tuple[int, ...] = ()
    scale: float | None = None
    standardise: Literal["none", "local"] = "none"
    held_out: float | None = None
    label_scale: tuple[float, ...] = ()
    test_path: str | None = None


@dataclass(frozen=True)
class TableOptions(Options):
    """Options of tables; see `edge_client.data` for the meanings. `label` is required to train."""

    label: str = ""
    features: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    other: tuple[str, ...] = ()
    fold: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    standardised: tuple[str, ...] = ()
    scaling: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    split: str | None = None
    closed: bool = False


HELD_OUT = 0.2

O = TypeVar("O", bound=Options)  # noqa: E741 - the options' own kind


def read_options(kind: type[O], config: DataConfig) -> tuple[O, Path]:
    """The options of `config` as a `kind`, and its path.

    Raises:
        DataProblem: an option is unknown or of another type, two contradict each other, or there is no path.
    """
    kinds = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in config.options.items():
        if name not in kinds:
            hint = suggest(name, kinds) or f"; it has: {', '.join(kinds)}"
            raise DataProblem(f"{config.kind} data has no option {name!r}{hint}")
        try:
            values[name] = read(kinds[name], _listed(value), f"option {name}")
        except InvalidDocument as error:
            raise DataProblem(f"{config.kind} data: {error}") from None
    options = kind(**values)
    _require_consistent(options, config)
    if config.path is None:
        raise DataProblem(f"{config.kind} data needs `path`, the file or folder to read")
    return options, config.path


def beside(path: Path, other: str) -> Path:
    """A further file that the options name; a relative path starts in the folder of `path`."""
    return path.parent / Path(other).expanduser()


def read_only_problem(path: Path, error: OSError) -> DataProblem:
    """The error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DataProblem(f"{path}: no such file; `path` of the data set names it")
    return DataProblem(f"{path}: cannot be read: {error.strerror or error}")


def _require_consistent(options: Options, config: DataConfig) -> None:
    names = [
        name for name in ("held_out", "test_path", "split") if getattr(options, name, None) not in (None, "")
    ]
    categories: Mapping[str, tuple[str, ...]] = getattr(options, "categories", {})
    checks = (
        (len(names) < 2, f"options {' and '.join(names)} contradict each other; give one of them"),
        _unique("classes", options.classes),
        *(_unique(f"categories of {column!r}", texts) for column, texts in categories.items()),
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
        (not categories or options.scale is None, "option scale is for numbers only, there are categories"),
        *_scaling_checks(options),
        (
            not options.label_scale or (len(options.label_scale) == 2 and options.label_scale[1] > 0),
            f"option label_scale is {list(options.label_scale)}, expected mean and deviation > 0 of the label",
        ),
        (
            not options.label_scale or not options.classes,
            "option label_scale is for a label that is a quantity, and option classes for one that is a class",
        ),
        (
            options.dtype != "int32" or options.standardise == "none",
            "option standardise is for float32 data, dtype is int32",
        ),
    )
    for holds, problem in checks:
        if not holds:
            raise DataProblem(f"{config.kind} data: {problem}")


def _scaling_checks(options: Options) -> Iterator[tuple[bool, str]]:
    scaling: Mapping[str, tuple[float, ...]] = getattr(options, "scaling", {})
    for column, numbers in scaling.items():
        yield (
            len(numbers) == 2,
            f"option scaling of {column!r} has {len(numbers)} numbers, expected mean and deviation",
        )
    unscaled = options.standardise == "none" and options.scale is None and options.dtype != "int32"
    yield not scaling or unscaled, "option scaling excludes the options standardise, scale and dtype"


def _unique(option: str, names: tuple[str, ...]) -> tuple[bool, str]:
    repeated = sorted({name for name in names if names.count(name) > 1})
    return not repeated, f"option {option} names {repeated[:1]} twice"


def _listed(value: object) -> object:
    """A tuple, which comes from Python, as the list that a file holds."""
    return list(value) if isinstance(value, tuple) else value
