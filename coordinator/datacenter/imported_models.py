"""The `--data`, `data.*` and `model.*` options of a command: the data set to calibrate and test on, and which model the params are of.

    --data digits                                    a data set by name, a table.csv, or one's own package.module:load
    --set data.label=kind --set data.features='["a"]'  how to read it, with the keys of [data] in `fedloop pretrain`
    --set model.name=cnn --set model.channels='[4, 8]'   which model the params are of

Imported models need them: a `.safetensors` file holds nothing but names and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from pydantic import ValidationError
from safetensors import SafetensorError

from coordinator.datacenter import training_data
from coordinator.datacenter.documents import EXPERIMENT, LINEAGE, MODEL, MODEL_KEYS, PARAMS
from coordinator.datacenter.environment import Environment
from coordinator.datacenter.pretrain_config import Data, Model
from coordinator.errors import UserError
from coordinator.experiments.validation import find_model_problems, format_error, to_user_error

_ONNX = "model.onnx"
_DATA = "--data, the data set to calibrate and test it on (such as digits, table.csv or package.module:load)"


@dataclass(frozen=True)
class DataOptions:
    """The data set and the model that a command names; both are optional."""

    data: Data | None = None
    model: Model = field(default_factory=Model)


def parse_data_options(name: str | None, tables: Mapping[str, Any], command: str) -> DataOptions:
    """The options `--data NAME` and the tables `data` and `model` of `--set`.

    Raises:
        UserError: listing every problem.
    """
    problems: list[str] = []
    table = tables.get("data")
    if name is not None and not isinstance(table, str):
        named = {"dataset": "csv", "path": name} if Path(name).suffix == ".csv" else {"dataset": name}
        table = {"test_rows": 0, **(table or {}), **named}
    data, model = None, Model()
    if isinstance(table, dict) and not (table.get("dataset") or table.get("path")):
        problems.append(f"data.{next(iter(table))} is set, but no data set is named; give --data")
    elif table is not None:
        try:
            data = Data.model_validate(table)
        except ValidationError as error:
            problems += [f"data.{format_error(item, Data)}" for item in error.errors()]
    try:
        model = Model.model_validate(tables.get("model", {}))
    except ValidationError as error:
        problems += [f"model.{format_error(item, Model)}" for item in error.errors()]
    if model.name is None and model.options:
        problems.append(f"model.{next(iter(model.options))} is set, but not model.name")
    elif model.name is not None:
        problems += find_model_problems(model.name, model.options)
    if problems:
        raise to_user_error(command, problems)
    return DataOptions(data, model)


def is_imported(folder: Path) -> bool:
    """Whether a folder holds params without their lineage."""
    return any(folder.glob("*.safetensors")) and not any(
        (folder / name).is_file() for name in (LINEAGE, EXPERIMENT)
    )


def load_rows(
    data: Data, seed: int, scratch: Path, environment: Environment
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The data set's arrays, in `scratch` and mapped into memory, and the result of loading them.

    Raises:
        UserError: the data or its description is wrong.
    """
    settings = data.model_dump(exclude_none=True)
    loaded = training_data.load_data(settings, seed, scratch / "data", environment)
    return training_data.read_arrays(scratch), loaded


def model_for(
    folder: Path, known: Mapping[str, Any] | None, options: DataOptions, loaded: Mapping[str, Any]
) -> dict[str, Any]:
    """The model in a folder as job files describe it: from its `model.json` (`known`), or from the options and the data.

    Raises:
        UserError: neither names the model, or it does not accept these rows.
    """
    if known is None:
        require_data_options(folder, options)
        return {
            "name": options.model.name,
            "options": options.model.options,
            **{key: loaded[key] for key in MODEL_KEYS},
        }
    if options.model.name not in (None, known["name"]):
        raise UserError(
            f"model.name = {options.model.name!r}: {folder / MODEL} says {known['name']!r}; remove the option"
        )
    model = {key: known[key] for key in ("name", "options", *MODEL_KEYS)}
    differing = [key for key in MODEL_KEYS if key != "classes" and model[key] != loaded[key]]
    differing += ["classes"] if loaded["classes"] > model["classes"] else []
    if differing:
        details = "; ".join(f"{key} {model[key]}, the data has {loaded[key]}" for key in differing)
        raise UserError(f"{folder}: its model does not accept this data: {details}")
    return model


def require_data_options(folder: Path, options: DataOptions) -> None:
    """Requires the options that an imported model needs.

    Raises:
        UserError: some are missing; the message names all of them.
    """
    missing = [_DATA] if options.data is None else []
    if not (folder / MODEL).is_file() and options.model.name is None:
        missing.append("--set model.name=NAME with its options, the model that its params are of")
    if missing:
        raise UserError(
            f"{folder}: there is no {LINEAGE} here that describes its rows, so it is an imported model; give "
            f"{' and '.join(missing)}"
        )


def params_in(folder: Path, scratch: Path) -> Path:
    """One file with all params of a folder; shards are merged into `scratch`.

    Raises:
        UserError: there is none, or two shards hold the same tensor.
    """
    if (folder / PARAMS).is_file():
        return folder / PARAMS
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        hint = (
            f"; import its {_ONNX} with --model NAME, so that its weights become params"
            if (folder / _ONNX).is_file()
            else ""
        )
        raise UserError(
            f"{folder}: there is no {PARAMS} here; expected a finished folder of `fedloop pretrain`, "
            f"`fedloop simulate`, `fedloop run` or `fedloop model export`{hint}"
        )
    merged: dict[str, npt.NDArray[Any]] = {}
    for shard in shards:
        try:
            tensors = safetensors.numpy.load_file(shard)
        except (
            OSError,
            SafetensorError,
            TypeError,
            KeyError,
        ) as error:  # the last two: bfloat16, which numpy lacks
            raise UserError(f"{shard}: cannot be read as float32 or float16 tensors: {error}") from None
        if repeated := sorted(merged.keys() & tensors.keys()):
            raise UserError(f"{shard}: has {repeated[0]}, which another shard has too; remove one of them")
        merged |= {
            name: tensor.astype(np.float32) if tensor.dtype.kind == "f" else tensor
            for name, tensor in tensors.items()
        }
    scratch.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(merged, scratch / PARAMS)
    return scratch / PARAMS
