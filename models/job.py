"""The job file of a datacenter worker: model, arrays, options and output folder.

    {"model": {"name": "cnn", "options": {}, "input_shape": [8, 8], "classes": 10,
               "input_dtype": "float32", "task": "classification"},
     "arrays": "arrays", "out": ".", "seed": 7, "options": {"epochs": 60}}

Paths are relative to the job file's folder. `arrays` is a folder of `.npy` files. Stages add their own
keys (`params`, `teacher`). A wrong value raises a JobError that names the file and the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from edge_client.files import write_durably
from models import options
from models.labels import PADDING
from models.options import JobError as JobError
from models.tasks import TASKS

if TYPE_CHECKING:
    from models.zoo import KerasSpec, ModelSpec

Options = TypeVar("Options")
T = TypeVar("T")

_CHUNK = 4096
"""Rows checked at a time."""


@dataclass(frozen=True)
class JobFile:
    """The contents of a job file."""

    path: Path
    settings: Mapping[str, Any]

    @property
    def seed(self) -> int:
        seed = self.settings.get("seed", 0)
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise JobError(f"{self.path}: seed is {seed!r}, expected a whole number >= 0")
        return seed

    @property
    def out(self) -> Path:
        """Folder for the results, created if missing."""
        folder = self.file("out", self.settings.get("out", "."))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def spec(self, *keys: str) -> ModelSpec:
        """The torch model described under `keys`, `("model",)` by default."""
        from models.zoo.resolve import get

        return self._resolve(get, keys)

    def any_spec(self) -> ModelSpec | KerasSpec:
        """The torch or Keras model described under `model`."""
        from models.zoo.resolve import find

        return self._resolve(find, ())

    def _resolve(self, find: Callable[..., T], keys: tuple[str, ...]) -> T:
        where = keys or ("model",)
        name = f"{self.path}: {'.'.join(where)}"
        described = options.only(self.value(*where), tuple(_MODEL_KEYS), name)
        known: dict[str, Any] = {}
        for key, (default, is_valid, expected) in _MODEL_KEYS.items():
            known[key] = described.get(key, default)
            if not is_valid(known[key]):
                raise JobError(f"{name}.{key} is {known[key]!r}, expected {expected}")
        known["input_shape"] = tuple(known["input_shape"])
        return find(known.pop("name"), **known.pop("options"), **known)

    def value(self, *keys: str) -> Any:
        """The value at the path `keys`."""
        value: Any = self.settings
        for depth, key in enumerate(keys):
            if not isinstance(value, Mapping) or key not in value:
                raise JobError(f"{self.path}: {'.'.join(keys[: depth + 1])} is missing")
            value = value[key]
        return value

    def file(self, key: str, value: object) -> Path:
        """`value` as a path, relative to the job file."""
        if not isinstance(value, str):
            raise JobError(f"{self.path}: {key} is {value!r}, expected a path")
        return self.path.parent / value

    def options(self, kind: type[Options]) -> Options:
        """`options` as the dataclass `kind`, with its defaults for missing keys."""
        return self.table("options", kind) or kind()

    def table(self, key: str, kind: type[Options]) -> Options | None:
        """The table `key` as the dataclass `kind`, or None if it is missing."""
        if key not in self.settings:
            return None
        return options.read(kind, self.settings[key], f"{self.path}: {key}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.settings.get(key, default)
        if not isinstance(value, bool):
            raise JobError(f"{self.path}: {key} is {value!r}, expected true or false")
        return value

    def number(self, key: str, default: float, least: float, most: float) -> float:
        """The number `key`, from `least` to `most`; whole if the default is."""
        value: float = self.settings.get(key, default)
        whole = isinstance(default, int)
        numeric = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not numeric or not least <= value <= most:
            noun = "a whole number" if whole else "a number"
            raise JobError(f"{self.path}: {key} is {value!r}, expected {noun} from {least} to {most}")
        return value

    def rows(self, name: str, spec: ModelSpec | KerasSpec, *, mapped: bool = False) -> npt.NDArray[Any]:
        """Examples `<arrays>/<name>.npy`, [N, *input_shape], N >= 1, in the model's input dtype.

        `mapped`: memory-mapped read-only, if the file has that dtype already.
        """
        array = self._array(name, mapped)
        if array.shape[1:] != spec.input_shape or not len(array):
            raise JobError(
                f"{self._array_path(name)} is {array.shape}, expected (rows, {', '.join(map(str, spec.input_shape))}) "
                f"with at least one row, for model {spec.name!r}"
            )
        if spec.input_dtype == "float32" and not all(
            np.isfinite(array[start : start + _CHUNK]).all() for start in range(0, len(array), _CHUNK)
        ):
            raise JobError(f"{self._array_path(name)} holds NaN or infinite values")
        return np.ascontiguousarray(array, dtype=spec.input_dtype)

    def labels(self, name: str, spec: ModelSpec | KerasSpec, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Labels `<arrays>/<name>.npy` of `x`, int32, from -1 (does not count) to classes - 1; or quantities, float32."""
        array = self._array(name)
        if spec.task == "regression":
            if array.shape != x.shape[:1] or array.dtype.kind != "f" or not np.isfinite(array).all():
                raise JobError(
                    f"{self._array_path(name)} is {array.dtype} {array.shape}, expected a finite number for each of "
                    f"{len(x)} rows"
                )
            return array.astype(np.float32)
        expected = x.shape[:2] if spec.task == "next_token" else x.shape[:1]
        if array.shape != expected or array.dtype.kind not in "iu":
            raise JobError(
                f"{self._array_path(name)} is {array.dtype} {array.shape}, expected whole numbers of shape {expected}"
            )
        if array.min() < PADDING or array.max() >= spec.classes:
            raise JobError(
                f"{self._array_path(name)} has labels from {array.min()} to {array.max()}, "
                f"expected {PADDING} to {spec.classes - 1}"
            )
        return array.astype(np.int32)

    def has_array(self, name: str) -> bool:
        return self._array_path(name).exists()

    def _array_path(self, name: str) -> Path:
        return self.file("arrays", self.value("arrays")) / f"{name}.npy"

    def _array(self, name: str, mapped: bool = False) -> npt.NDArray[Any]:
        path = self._array_path(name)
        try:
            array: npt.NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        except FileNotFoundError:
            raise JobError(f"{path} does not exist; {self.path} names its folder as `arrays`") from None
        except (ValueError, EOFError, OSError) as error:
            raise JobError(f"{path} is not a readable .npy file without pickled objects: {error}") from error
        return array


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# key -> default, validity check, expected value
_MODEL_KEYS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "name": (None, lambda value: isinstance(value, str), "the name of a model"),
    "options": ({}, lambda value: isinstance(value, dict), "an object"),
    "input_shape": (
        None,
        lambda value: isinstance(value, list) and all(map(_count, value)),
        "a list of extents",
    ),
    "classes": (None, _count, "a whole number >= 1"),
    "input_dtype": ("float32", lambda value: value in ("float32", "int32"), "float32 or int32"),
    "task": (
        "classification",
        lambda value: isinstance(value, str) and value in TASKS,
        "classification, next_token or regression",
    ),
}


def read(path: Path) -> JobFile:
    """The job in the JSON file `path`.

    Raises:
        JobError: the file is missing, is not JSON, or holds no object.
    """
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise JobError(f"{path} holds {type(settings).__name__}, expected an object")
    return JobFile(path.absolute(), settings)


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        JobError: the file cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise JobError(f"{path} is not JSON: {error}") from error


def read_params(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors in a `.safetensors` file.

    Raises:
        JobError: it cannot be read.
    """
    try:
        return safetensors.numpy.load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise JobError(f"{path} is not a readable .safetensors file: {error}") from error


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes `result.json` into `folder`, atomically."""
    write_durably(folder / "result.json", (json.dumps(result, indent=2) + "\n").encode())
