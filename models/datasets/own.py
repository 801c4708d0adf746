"""A user's own loader, `package.module:load`, and the checks on what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from edge_client.data import numpy_file
from edge_client.data.quoting import is_content_hidden
from edge_client.wire.preprocessing import ImageSchema
from models import user_code
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out
from models.datasets.standardise import standardised_labels
from models.labels import PADDING
from models.tasks import TASKS, TaskKind
from strategies.suggestions import suggest

KEYS = ("x", "y", "test", "x_test", "y_test", "site", "classes", "task", "class_names")


def load(target: str, data_dir: Path | None, seed: int) -> Dataset:
    """The data set that `target` returns.

    The function is called with `data_dir` (a Path or None) and `seed` where its signature has them, and returns
    a mapping: `x` [N, …] numbers, or whole numbers for tokens; `y` class indices [N], or [N, T] beside tokens
    [N, T]. Optional are `test` (bool [N]) or else `x_test` and `y_test`, `site` ([N], names or numbers),
    `classes`, `class_names`, and `task` (`classification`, `next_token`, or `regression`, whose `y` holds quantities).

    Raises:
        DataError: it cannot be imported, fails, or returns something else; the message names what was expected.
    """
    try:
        function = user_code.load(target)
    except user_code.UserCodeError as error:
        raise DataError(f"data set {target!r}: {error}") from error
    returned = call(function, target, data_dir, seed)
    try:
        return _dataset(target, f"Loaded by {target}.", returned, seed)
    except DataError as error:
        raise DataError(f"{target}: {error}") from error


def read_archive(path: Path, seed: int) -> Dataset:
    """The data set in a `.npz` file, whose arrays are called as the keys of what a loader returns.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    arrays: dict[str, Any] = dict(numpy_file.read_archive(path))
    for key in ("classes", "task", "class_names"):
        if key in arrays:
            arrays[key] = arrays[key].tolist()  # of an array without axes the value itself
    try:
        return _dataset(path.stem, f"Read from {path.name}.", arrays, seed)
    except DataError as error:
        if is_content_hidden():
            raise DataError(
                f"{path}: holds something else than the x, y and further arrays of a data set"
            ) from None
        raise DataError(f"{path}: {error}") from error


def archive(mapping: Mapping[str, Any], seed: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a `.npz` file from which `read_archive` reads what a loader returned.

    Raises:
        DataError: it is no data set, as `load` says.
    """
    _dataset("data", "", mapping, seed)
    given = {key: value for key, value in mapping.items() if value is not None}
    scalars: dict[str, npt.NDArray[Any]] = {
        key: np.asarray(given.pop(key)) for key in ("classes", "task", "class_names") if key in given
    }
    return {**{key: _array(key, value) for key, value in given.items()}, **scalars}


def call(function: Callable[..., Any], name: str, data_dir: Path | None, seed: int) -> Mapping[Any, Any]:
    """What a loader returns, called as `load` calls it. `name`: of the loader in messages.

    Raises:
        DataError: it fails, or returns no mapping.
    """
    returned = _call(function, name, {"data_dir": data_dir, "seed": seed})
    if not isinstance(returned, Mapping):
        raise DataError(
            f"{name}{user_code.definition_location(function)} returned {type(returned).__name__}, expected a mapping such as {{'x': …, 'y': …}}"
        )
    return returned


def _call(function: Callable[..., Any], target: str, arguments: dict[str, Any]) -> Any:
    try:
        accepted: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        accepted = {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    try:
        return function(**{name: value for name, value in arguments.items() if takes_any or name in accepted})
    except Exception as error:  # shows the user any error of their code
        raise DataError(
            f"{target} failed{user_code.error_location(error, function)}: {type(error).__name__}: {error}"
        ) from error


def _require_keys(mapping: Mapping[Any, Any]) -> None:
    for key in mapping:
        if key not in KEYS:
            raise DataError(f"returned key {key!r}{suggest(str(key), KEYS)}; known: {', '.join(KEYS)}")
    for key in ("x", "y"):
        if mapping.get(key) is None:
            present = [each for each, value in mapping.items() if value is not None]
            raise DataError(f"returned no {key!r}; it returned: {', '.join(present) or 'nothing'}")


def _dataset(name: str, origin: str, mapping: Mapping[Any, Any], seed: int) -> Dataset:
    """`origin`: a sentence that says where the arrays are from."""
    _require_keys(mapping)
    returned = {key: value for key, value in mapping.items() if value is not None}
    read_labels: Callable[[str, Any], npt.NDArray[Any]] = (
        _quantities if returned.get("task") == "regression" else _labels
    )
    x = _inputs("x", returned["x"])
    y: npt.NDArray[Any] = read_labels("y", returned["y"])
    test = None
    if "x_test" in returned or "y_test" in returned:
        x, y, test = _with_test_arrays(returned, x, y, read_labels)
    elif "test" in returned:
        test = _mask(returned["test"], len(x))
    _same_rows("y", y, "x", x)
    task = _task(returned.get("task"), x, y)
    classes, class_names = (1, ()) if task == "regression" else _classes(returned, x, y, task)
    site, site_names = _sites(returned["site"], len(x)) if "site" in returned else (None, ())
    notes = (origin, "The data says which rows are held out.")
    if test is None:
        flat = y if task != "next_token" else np.zeros(len(y), np.int32)
        test = held_out(flat, seed, site)
        notes = (
            notes[0],
            f"20 % of {'each site' if site is not None else 'the rows'} is held out, by the seed.",
        )
    if test.all() or not test.any():
        raise DataError(
            f"{int(test.sum())} of {len(test)} rows are held out for testing; expected some, and not all"
        )
    label_scale = None
    if task == "regression":
        y, label_scale = standardised_labels(y, test)
    return Dataset(
        name,
        x,
        y,
        test,
        classes,
        task,
        class_names,
        site,
        site_names,
        notes,
        label_scale=label_scale,
        image=image_of(np.asarray(returned["x"])),
    )


def image_of(x: npt.NDArray[Any]) -> ImageSchema | None:
    """Bytes [N, H, W], or with 1 or 3 channels before or after, are images, whose pixels are the input; None of other data."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        return None
    if x.ndim == 3:
        return ImageSchema("HW", maximum=255, divisor=1.0)
    if x.shape[1] in (1, 3):
        return ImageSchema("CHW", maximum=255, divisor=1.0)
    return ImageSchema("HWC", maximum=255, divisor=1.0) if x.shape[3] in (1, 3) else None


def _inputs(key: str, value: Any) -> npt.NDArray[Any]:
    """float32 from any floats, booleans or bytes (images); int32 from whole numbers (tokens)."""
    array = _array(key, value)
    if array.ndim < 2:
        raise DataError(f"{key} has shape {array.shape}, expected rows and at least one more axis")
    if not array[0].size:
        raise DataError(f"{key} has shape {array.shape}, expected at least one value in each row")
    if array.dtype.kind == "f" or array.dtype in (np.bool_, np.uint8):
        with np.errstate(over="ignore"):
            numbers = np.ascontiguousarray(array, dtype=np.float32)
        _all_finite(key, numbers)
        return numbers
    if array.dtype.kind in "iu":
        return _int32(key, array, 0, "token ids are 0 or more; numbers that are no tokens belong in floats")
    raise DataError(f"{key} is of type {array.dtype}, expected floats, or whole numbers for tokens")


def _labels(key: str, value: Any) -> npt.NDArray[np.int32]:
    array = _array(key, value)
    if array.dtype.kind not in "iub":
        raise DataError(
            f"{key} is of type {array.dtype}, expected whole numbers from 0, one a class "
            f"(np.unique({key}, return_inverse=True) turns other labels into them)"
        )
    if array.ndim not in (1, 2) or array.shape[1:] == (1,):
        raise DataError(f"{key} has shape {array.shape}, expected one label a row, or [rows, tokens]")
    return _int32(key, array, PADDING if array.ndim == 2 else 0, "labels count from 0")


def _quantities(key: str, value: Any) -> npt.NDArray[Any]:
    array = _array(key, value)
    if array.dtype.kind not in "fiu" or array.ndim != 1:
        raise DataError(f"{key} is {array.dtype} {array.shape}, expected one number a row for regression")
    wrong = np.flatnonzero(~np.isfinite(array))
    if len(wrong):
        raise DataError(f"{key} is {array[wrong[0]]} in row {wrong[0]}; fill or drop such rows")
    return array.astype(np.float64)


def _array(key: str, value: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{key} cannot be made an array: {error}") from error
    if array.dtype == object:
        raise DataError(f"{key} is a ragged list or holds objects, expected an array of numbers")
    if not array.ndim or not len(array):
        raise DataError(f"{key} has no rows")
    return array


def _int32(key: str, array: npt.NDArray[Any], least: int, why: str) -> npt.NDArray[np.int32]:
    wrong = np.argwhere((array < least) | (array > np.iinfo(np.int32).max))
    if len(wrong):
        raise DataError(f"{key} is {array[tuple(wrong[0])]} in row {wrong[0][0]}; {why}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _all_finite(key: str, x: npt.NDArray[np.float32]) -> None:
    wrong = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
    if len(wrong):
        raise DataError(
            f"{key} has a NaN, an infinity or a number beyond float32 in row {wrong[0]} "
            f"({len(wrong):,} such rows); fill or drop them"
        )


def _with_test_arrays(
    returned: dict[str, Any],
    x: npt.NDArray[Any],
    y: npt.NDArray[Any],
    read_labels: Callable[[str, Any], npt.NDArray[Any]],
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.bool_]]:
    if "x_test" not in returned or "y_test" not in returned:
        raise DataError("returned only one of x_test and y_test; return both or neither")
    for key in ("test", "site"):
        if key in returned:
            raise DataError(
                f"returned {key} beside x_test and y_test; return all rows in x and y and mark those held out in test"
            )
    x_test, y_test = _inputs("x_test", returned["x_test"]), read_labels("y_test", returned["y_test"])
    _same_rows("y", y, "x", x)
    _same_rows("y_test", y_test, "x_test", x_test)
    for key, first, second in (("x_test", x, x_test), ("y_test", y, y_test)):
        if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
            raise DataError(
                f"{key} holds {second.dtype} rows of shape {second.shape[1:]}, those for training are "
                f"{first.dtype} of shape {first.shape[1:]}"
            )
    test = np.arange(len(x) + len(x_test)) >= len(x)
    return np.concatenate([x, x_test]), np.concatenate([y, y_test]), test


def _same_rows(key: str, array: npt.NDArray[Any], other: str, rows: npt.NDArray[Any]) -> None:
    if len(array) != len(rows):
        raise DataError(f"{key} has {len(array):,} rows, {other} has {len(rows):,}")


def _mask(value: Any, rows: int) -> npt.NDArray[np.bool_]:
    array = _array("test", value)
    if array.dtype != np.bool_ or array.shape != (rows,):
        raise DataError(f"test is {array.dtype} {array.shape}, expected bool ({rows},), True where held out")
    return array


def _task(task: Any, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> TaskKind:
    if task is not None and not (isinstance(task, str) and task in TASKS):
        raise DataError(f"task is {task!r}, expected {' or '.join(TASKS)}")
    chosen: TaskKind = cast(TaskKind | None, task) or ("next_token" if y.ndim == 2 else "classification")
    if chosen == "classification" and y.ndim != 1:
        raise DataError(f"y has shape {y.shape}, expected ({len(y)},) for classification")
    if chosen == "next_token" and (x.dtype != np.int32 or x.shape != y.shape):
        raise DataError(
            f"for next_token, x and y are whole numbers of one shape [rows, tokens]; "
            f"x is {x.dtype} {x.shape}, y has shape {y.shape}"
        )
    return chosen


def _classes(
    returned: dict[str, Any], x: npt.NDArray[Any], y: npt.NDArray[np.int32], task: TaskKind
) -> tuple[int, tuple[str, ...]]:
    largest = max(int(y.max()), int(x.max()) if task == "next_token" else 0)
    names = returned.get("class_names", ())
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise DataError(f"class_names is {names!r}, expected a list of texts")
    classes = returned.get("classes", len(names) or largest + 1)
    if not isinstance(classes, int | np.integer) or isinstance(classes, bool) or classes < 2:
        raise DataError(f"{classes!r} classes, expected a whole number from 2")
    if largest >= classes:
        raise DataError(f"label or token {largest} with {classes} classes, expected 0 to {classes - 1}")
    if names and len(names) != classes:
        raise DataError(f"{len(names)} class_names for {classes} classes")
    return int(classes), tuple(names)


def _sites(value: Any, rows: int) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    array = _array("site", value)
    if array.shape != (rows,) or array.dtype.kind not in "iuU":
        raise DataError(
            f"site is {array.dtype} {array.shape}, expected a name or whole number for each of {rows} rows"
        )
    names, site = np.unique(array, return_inverse=True)
    return site.astype(np.int32), tuple(str(name) for name in names)
