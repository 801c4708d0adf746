"""The trained model that a command starts from, with rows to calibrate and score it on.

| source                                    | rows                                                          |
|-------------------------------------------|---------------------------------------------------------------|
| folder of `fedloop pretrain`              | its own, or those of `--data`                                 |
| folder of `fedloop compress`              | the same                                                      |
| folder of a finished run                  | its held-out rows: one half calibrates, the other half scores |
| params from elsewhere, or a `.keras` file | those of `--data`                                             |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from coordinator.datacenter import training_data
from coordinator.datacenter.compression_pipeline import Pipeline
from coordinator.datacenter.documents import (
    EXPERIMENT,
    LINEAGE,
    MODEL,
    PARAMS,
    PIPELINE,
    PUBLIC,
    read_document,
)
from coordinator.datacenter.jobs import Environment
from coordinator.datacenter.training_data import Arrays, DataOptions, TrainingData, sample_rows
from coordinator.errors import UserError
from coordinator.experiments import experiment
from coordinator.experiments.schema import Experiment
from coordinator.experiments.validation import dataset_name_problem
from edge_client.files import file_sha256, write_durably
from edge_client.wire.schema import SCHEMA_NAME
from models import user_code
from models.datasets.names import KEYS
from models.tasks import MODEL_KEYS

_ONNX = "model.onnx"
_LEAST_ROWS = 2
"""Held-out rows of a run, half to calibrate with."""

_TABLE = (
    "--data, a table of typical rows, made-up ones too, to calibrate and test it on by the run's own schema"
)
_DATA = "--data, the data set to calibrate and test it on (such as digits, table.csv or package.module:load)"


@dataclass(frozen=True)
class Source:
    """A trained model.

    Attributes:
        model: as job files describe it.
        params: its `.safetensors`, or a `.keras` file.
        arrays: `x_train`, `y_train` to train and calibrate with, `x_test`, `y_test` to score on.
        lineage: the origin of its params.
        scored: which rows accuracies are measured on, for people.
    """

    model: Mapping[str, Any]
    params: Path
    arrays: Arrays
    seed: int
    lineage: Mapping[str, Any]
    scored: str = "held-out rows"


@dataclass(frozen=True)
class SourceReader:
    """Reads trained models.

    Attributes:
        pipeline: how many rows to use, and the seed that draws them.
        scratch: folder for the arrays and params that have to be made.
        options: data set and model named by the command.
    """

    pipeline: Pipeline
    scratch: Path
    environment: Environment
    options: DataOptions = field(default_factory=DataOptions)

    def read(self, path: Path) -> Source:
        """The trained model in the folder `path`, or in the `.keras` file `path`.

        Raises:
            UserError: there is none, or the command's options lack something that it needs.
        """
        if path.suffix == user_code.KERAS_FILE:
            return self._keras_file(path)
        if is_imported(path):
            require_data_options(path, self.options)
        params = params_in(path, self.scratch)
        if (path / LINEAGE).is_file():
            return self._pretrained(path)
        if (path / EXPERIMENT).is_file():
            return self._run(path)
        return self._imported(path, params)

    def _pretrained(self, folder: Path) -> Source:
        model = read_model(folder)
        lineage = read_document(folder / LINEAGE, "model_sha256", "seed")
        if file_sha256(folder / PARAMS) != lineage["model_sha256"]:
            raise UserError(
                f"{folder / PARAMS}: is not the file that {LINEAGE} describes; it was replaced since"
            )
        seed = lineage["seed"] if self.pipeline.seed is None else self.pipeline.seed
        if self.options.data is not None:
            arrays, loaded, given = self._given_rows(self.options.data, seed, folder)
            model = model_for(folder, model, self.options, loaded)
            lineage = {**lineage, **given}
        else:
            # A compression keeps its rows in its own folder, so its result can be compressed again.
            compressed = (folder / PIPELINE).is_file()
            arrays = _compression_rows(folder / "arrays") if compressed else training_data.read_arrays(folder)
        return self._sampled(model, folder / PARAMS, arrays, seed, lineage)

    def _imported(self, folder: Path, params: Path) -> Source:
        known = read_model(folder) if (folder / MODEL).is_file() else None
        require_data_options(folder, self.options)
        assert self.options.data is not None
        seed = self.pipeline.seed or 0
        arrays, loaded, given = self._given_rows(self.options.data, seed, folder)
        model = model_for(folder, known, self.options, loaded)
        source = {"imported": str(folder.absolute()), "model_sha256": file_sha256(params)}
        lineage = {**source, **given, "seed": seed}
        return self._sampled(model, params, arrays, seed, lineage)

    def _keras_file(self, path: Path) -> Source:
        if not path.is_file():
            raise UserError(f"{path}: there is no such file")
        if self.options.data is None:
            raise UserError(
                f"{path}: --data is missing: the data set to calibrate and score it on, such as digits"
            )
        arrays, loaded, given = self._given_rows(self.options.data, 0, None)
        model = {"name": str(path), "options": {}, **{key: loaded[key] for key in MODEL_KEYS}}
        lineage = {"model_sha256": file_sha256(path), **given}
        rows = sample_rows(arrays, self.pipeline.limits, np.random.default_rng(0))
        return Source(model, path, rows, 0, lineage)

    def _run(self, folder: Path) -> Source:
        if self.options.model.name is not None:
            raise UserError(
                f"model.name = {self.options.model.name!r}: {folder} is a run, which names its model itself; remove the option"
            )
        run = run_in(folder)
        held_out, loaded = self._held_out(run, folder)
        seed = run.seed if self.pipeline.seed is None else self.pipeline.seed
        rng = np.random.default_rng(seed)
        whose = "the run's" if self.options.data is None else "--data's"
        order = rng.permutation(len(held_out["x"]))
        if len(order) < _LEAST_ROWS:
            raise UserError(
                f"{folder}: {len(order)} of {whose} rows are held out, expected {_LEAST_ROWS} at least, half to calibrate with and half to "
                "score on; give --data more rows, of which a fifth is held out, or those that a column called split marks as test"
            )
        parts = {"train": order[: len(order) // 2], "test": order[len(order) // 2 :]}
        arrays = {f"{key}_{part}": held_out[key][rows] for part, rows in parts.items() for key in "xy"}
        lineage = {
            "run": str(folder.absolute()),
            "model_sha256": file_sha256(folder / PARAMS),
            "data_fingerprint": loaded["fingerprint"],
            PUBLIC: (self.options.data or run.data).is_public,
            "seed": run.seed,
        }
        return Source(
            run.model.describe(loaded),
            folder / PARAMS,
            sample_rows(arrays, self.pipeline.limits, rng),
            seed,
            lineage,
            f"of {whose} {len(order)} held-out rows; the other half trains and calibrates",
        )

    def _held_out(self, run: Experiment, folder: Path) -> tuple[Arrays, dict[str, Any]]:
        """The rows `x` and `y` that the run held out, or those of `--data`, and the result of loading them."""
        if self.options.data is not None:
            arrays, loaded = load_rows(
                self.options.data, run.data_seed, self.scratch, self.environment, folder
            )
            return {key: arrays[f"{key}_test"] for key in "xy"}, loaded
        if dataset_name_problem(run.data.loaded_as) is not None:
            schema = run.data.data_schema
            given = _DATA if schema is None else f"{_TABLE}, with the label {schema['label']!r}"
            raise UserError(f"{folder}: only devices hold the rows that it was trained on; give {given}")
        data = run.data.to_load
        settings = {key: data[key] for key in KEYS if data[key] is not None}
        loaded = training_data.load_data(settings, run.data_seed, self.scratch, self.environment)
        arrays_folder = self.scratch / "arrays"
        return {key: np.load(arrays_folder / f"{key}_test.npy", mmap_mode="r") for key in "xy"}, loaded

    def _given_rows(
        self, data: TrainingData, seed: int, folder: Path | None
    ) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any], dict[str, Any]]:
        """The rows of `--data` for the model in `folder`, the result of loading them, and what a lineage says of them."""
        arrays, loaded = load_rows(data, seed, self.scratch, self.environment, folder)
        return arrays, loaded, {"data_fingerprint": loaded["fingerprint"], PUBLIC: data.is_public}

    def _sampled(
        self, model: Mapping[str, Any], params: Path, arrays: Arrays, seed: int, lineage: Mapping[str, Any]
    ) -> Source:
        """The source with as many of its rows as the pipeline uses."""
        count, limit = len(arrays["x_test"]), self.pipeline.test_rows
        scored = (
            f"held-out rows, drawn from {count:,} (test_rows = {limit})" if count > limit else "held-out rows"
        )
        rows = sample_rows(arrays, self.pipeline.limits, np.random.default_rng(seed))
        return Source(model, params, rows, seed, lineage, scored)


def copy_schema(source: Source, out: Path) -> None:
    """Copies the data schema beside a run's or a pretraining's params, if there is one, into `out`."""
    schema = source.params.with_name(SCHEMA_NAME)
    if source.params.name == PARAMS and schema.is_file():
        write_durably(out / SCHEMA_NAME, schema.read_bytes())


def run_in(folder: Path) -> Experiment:
    """The experiment of the run in a folder."""
    return experiment.read_finished(folder / EXPERIMENT)


def _compression_rows(folder: Path) -> dict[str, npt.NDArray[Any]]:
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        return {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: the rows of that compression cannot be read: {error}") from None


def is_imported(folder: Path) -> bool:
    """Whether a folder holds params without their lineage."""
    return any(folder.glob("*.safetensors")) and not any(
        (folder / name).is_file() for name in (LINEAGE, EXPERIMENT)
    )


def load_rows(
    data: TrainingData, seed: int, scratch: Path, environment: Environment, folder: Path | None
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The data set's arrays, in `scratch` and mapped into memory, and the result of loading them.

    `folder`: of the model that they are for. A table is read by the data schema there, so that its rows mean what the model's
    training rows meant; other data has to be what the schema says.

    Raises:
        UserError: the data or its description is wrong.
    """
    settings = data.model_dump(exclude_none=True)
    if folder is not None:
        if (folder / SCHEMA_NAME).is_file():
            settings["schema"] = read_document(folder / SCHEMA_NAME)
        _require_known_scale(settings, folder)
    loaded = training_data.load_data(settings, seed, scratch / "data", environment)
    return training_data.read_arrays(scratch), loaded


def _require_known_scale(settings: Mapping[str, Any], folder: Path) -> None:
    """Refuses a table without `scale` for a trained model that has no schema of one: nothing says how its training rows were scaled.

    Raises:
        UserError: it is such a table.
    """
    is_trained_here = (folder / EXPERIMENT).is_file() or "schema" in settings
    is_described = settings.get("schema", {}).get("kind", "array") != "array"
    if settings["dataset"] == "csv" and is_trained_here and not is_described and "scale" not in settings:
        raise UserError(
            f"{settings['path']}: {folder} has no schema of a table, so nothing says how the numbers that its model was trained on were "
            "scaled; give a .npz with its inputs as they were, or say it: --set data.scale=none, or --set data.scale=fixed with each "
            "column's mean and deviation in data.fixed"
        )


def model_for(
    folder: Path, known: Mapping[str, Any] | None, options: DataOptions, loaded: Mapping[str, Any]
) -> dict[str, Any]:
    """The model in a folder as job files describe it: from its `model.json` (`known`), or from the options and the data.

    Raises:
        UserError: neither names the model, or it does not accept these rows.
    """
    if known is None:
        require_data_options(folder, options)
        return options.model.describe(loaded)
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


def read_model(folder: Path) -> dict[str, Any]:
    """The model described by `model.json`, with the keys of a job file.

    Raises:
        UserError: as `read_document`.
    """
    keys = ("name", "options", *MODEL_KEYS)
    document = read_document(folder / MODEL, *keys)
    return {key: document[key] for key in keys}
