"""Data sets for datacenter commands: named by options, loaded by a worker into `FOLDER/arrays`, read back mapped into memory.

    --data digits                                    a data set by name, a table.csv, arrays.npz, or one's own package.module:load
    --set data.label=kind --set data.features='["a"]'  how to read it, with the keys of [data] in `fedloop pretrain`
    --set model.name=cnn --set model.channels='[4, 8]'   which model the params are of

Imported models need these options: a `.safetensors` file holds nothing but names and numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from coordinator.datacenter import jobs
from coordinator.datacenter.job_worker import JobFailed
from coordinator.datacenter.jobs import DatacenterJob, Environment
from coordinator.document_checks import read_table, to_user_error
from coordinator.errors import UserError
from coordinator.experiments.schema import DataSection, ModelSection
from coordinator.experiments.validation import (
    TABLE_KEYS,
    find_model_problems,
    find_table_problems,
    own_key_problems,
)
from models.datasets.dataset import DataError
from models.datasets.token_files.directory import SPLITS, TOKENIZER, VERIFIED, open_directory

_TABLES = (".csv", ".tsv", ".parquet")
"""Of a file that `--data` names: a table."""

_TOKENS = re.compile(r"characters|bytes|bpe\(\d+\)")

Arrays = Mapping[str, npt.NDArray[Any]]


TEXT, TOKENS = "text", "tokens"
"""The names of the data sets that read the user's own text file, and a folder that `fedloop pretrain tokenize` made."""

LEARNT = (TEXT, "shakespeare")
"""Those of them whose encoding is learnt from the text, unless it is given."""

_OWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "path": ("csv", "npz", TEXT, TOKENS),
    "label": ("csv", TEXT),
    "task": ("csv",),
    **TABLE_KEYS,
    "features": ("csv", TEXT),
    "length": ("shakespeare", "phrasebank", TEXT, TOKENS),
    "packing": (TOKENS,),
    "encoding": ("csv", "shakespeare", TEXT),
    "vocab": ("phrasebank",),
}


class TrainingData(DataSection):
    """The training data.

    Attributes:
        encoding: of a table's text; of a text's tokens `characters`, `bytes`, `bpe(n)`, or the path of a tokenizer.json or of a folder with one.
        packing: of a folder of token files: `concatenate` cuts all documents, one after another, into rows; `documents` puts whole documents into
            a row and confines attention to each.
        task: `regression` predicts the label of a table as a quantity.
        test_rows: at most so many of the held-out rows are scored; 0: all.
        public_samples: train only on so many rows, which an experiment of this number and this `data.seed` withholds from its clients; 0: all.
    """

    site: str | None = None
    encoding: str | None = None
    packing: Literal["concatenate", "documents"] | None = None
    task: Literal["classification", "regression"] | None = None
    test_rows: Annotated[int, Field(ge=0)] = 1000


class StartModel(ModelSection):
    """The model: `name` and initial params; every other key is an option of the model.

    `init` is a `.safetensors` file, `head` says whether its last module is used too.
    """

    init: str | None = None
    head: Literal["same", "new"] | None = None


@dataclass(frozen=True)
class DataOptions:
    """The data set and the model that a command names; both are optional."""

    data: TrainingData | None = None
    model: StartModel = field(default_factory=StartModel)


def parse_data_options(name: str | None, tables: Mapping[str, Any], command: str) -> DataOptions:
    """The options `--data NAME` and the tables `data` and `model` of `--set`.

    Raises:
        UserError: listing every problem.
    """
    problems: list[str] = []
    table = tables.get("data")
    if name is not None and not isinstance(table, str):
        suffix = Path(name).suffix.lower()
        kind = "csv" if suffix in _TABLES else "npz" if suffix == ".npz" else None
        named = {"dataset": name} if kind is None else {"dataset": kind, "path": name}
        table = {"test_rows": 0, **(table or {}), **named}
    data = None
    if isinstance(table, dict) and not (table.get("dataset") or table.get("path")):
        problems.append(f"data.{next(iter(table))} is set, but no data set is named; give --data")
    elif table is not None:
        data = read_table(TrainingData, table, problems, "data.")
        problems += [] if data is None else find_data_problems(data)
    model = read_table(StartModel, tables.get("model", {}), problems, "model.") or StartModel()
    if model.name is None and model.options:
        problems.append(f"model.{next(iter(model.options))} is set, but not model.name")
    elif model.name is not None:
        problems += find_model_problems(model.name, model.options)
    if problems:
        raise to_user_error(command, problems)
    return DataOptions(data, model)


def find_data_problems(data: TrainingData) -> Iterator[str]:
    """One sentence for each key that is not for its data set, or contradicts another."""
    encoding = data.encoding or "characters"
    if data.dataset in LEARNT and not (_TOKENS.fullmatch(encoding) or names_tokenizer(encoding)):
        yield (
            f"data.encoding = {data.encoding!r}: expected characters, bytes, bpe(n) such as bpe(512), or the path of a tokenizer.json or of "
            "a folder with one"
        )
    yield from find_table_problems(data)
    yield from own_key_problems(data, _OWN_KEYS)
    if data.dataset == TEXT and (data.label is not None or data.features is not None):
        yield from _labelled_problems(data)


def _labelled_problems(data: TrainingData) -> Iterator[str]:
    if data.label is None or len(data.features or ()) != 1:
        yield (
            f"data.label = {data.label!r} and data.features = {data.features!r}: texts to classify are a table with the label in one column "
            'and the text in another, such as data.label = "rating" and data.features = ["review"]'
        )
    if data.path is not None and Path(data.path).suffix.lower() not in _TABLES:
        yield f"data.path = {data.path!r}: texts with a label are in a table, {', '.join(_TABLES)}"
    if not names_tokenizer(data.encoding or ""):
        yield (
            f"data.encoding = {data.encoding!r}: texts with a label are encoded by a tokenizer; name the folder of a model with a "
            "tokenizer.json, or start from one with model.init"
        )


def names_tokenizer(encoding: str) -> bool:
    """Whether an encoding is the path of a `tokenizer.json` or of a folder: it has a separator, or is one."""
    if not encoding or _TOKENS.fullmatch(encoding):
        return False
    return encoding.endswith(".json") or "/" in encoding or os.sep in encoding or Path(encoding).is_dir()


def find_tokenizer(folder: Path) -> Path | None:
    """Of the model in a folder of Hugging Face, an import or a pretraining: the folder itself or the `tokenizer.json` of its data."""
    of_data = folder / "data" / "arrays" / TOKENIZER
    return folder if (folder / TOKENIZER).is_file() else of_data if of_data.is_file() else None


def load_data(
    settings: Mapping[str, Any], seed: int, folder: Path, environment: Environment
) -> dict[str, Any]:
    """Loads the data set that `settings` describe (see `models.datasets.job_arrays`) into `folder`/arrays.

    Returns:
        The worker's result: `fingerprint`, `rows`, `preview` and the keys of a model that follow from the data.

    Raises:
        UserError: the data or its description is wrong.
    """
    data_dir = {"data_dir": str(environment.data_dir.absolute())} if environment.data_dir else {}
    described = {key: value for key, value in settings.items() if key != "public"}
    job = DatacenterJob("load", {}, {}, seed=seed, more={"data": {**described, **data_dir}})
    with as_user_errors():
        return jobs.run(job, folder, environment.progress.trained, environment.clock)


def check_loaded(loaded: Mapping[str, Any]) -> None:
    """Checks data that were loaded before: token files that were touched since are read again. `loaded`: as `load_data` returns it.

    Raises:
        UserError: they were removed, replaced or damaged.
    """
    tokens = loaded.get("tokens", {})
    if "directory" not in tokens:
        return
    path = Path(tokens["directory"])
    try:
        found = open_directory(path, tokens["sha256"])
        if (path / VERIFIED).exists():  # not on read-only storage, where nothing was noted
            found.verify()
    except DataError as error:
        raise UserError(str(error)) from None


def read_arrays(out: Path) -> dict[str, npt.NDArray[Any]]:
    """The training and test rows loaded into `out`/data, mapped into memory.

    Raises:
        UserError: the files were removed.
    """
    folder = out / "data" / "arrays"
    try:
        loaded = jobs.resume(out / "data") if jobs.read(out / "data") else {}
        if "tokens" in loaded:
            return _windows(folder, loaded["tokens"], loaded["input_shape"][0])
        return {
            f"{key}_{part}": np.load(folder / f"{key}_{part}.npy", mmap_mode="r", allow_pickle=False)
            for part in ("train", "test")
            for key in "xy"
        }
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; the pretraining's data was removed") from None
    except DataError as error:
        raise UserError(str(error)) from None


def _windows(folder: Path, tokens: Mapping[str, Any], length: int) -> dict[str, npt.NDArray[Any]]:
    """Windows of the tokens that a pretraining loaded, mapped into memory: token files or their directory, without packing."""
    arrays = {}
    found = open_directory(Path(tokens["directory"]), tokens["sha256"]) if "directory" in tokens else None
    for part in SPLITS:
        mapped = (
            np.load(folder / tokens[part], mmap_mode="r", allow_pickle=False)
            if found is None
            else found.tokens(part)
        )
        rows = np.lib.stride_tricks.sliding_window_view(mapped, length + 1)[::length]
        arrays[f"x_{part}"], arrays[f"y_{part}"] = rows[:, :-1], rows[:, 1:]
    return arrays


def sample_rows(
    arrays: Arrays, limits: Mapping[str, int], rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """At most `limits[part]` rows of each part, drawn at random."""
    sampled: dict[str, npt.NDArray[Any]] = {}
    for part, count in limits.items():
        rows = np.sort(rng.permutation(len(arrays[f"x_{part}"]))[:count])
        sampled |= {f"{key}_{part}": _in_memory(arrays[f"{key}_{part}"][rows]) for key in "xy"}
    return sampled


def _in_memory(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The rows as models take them: token ids of files are unsigned."""
    return np.ascontiguousarray(rows, np.int32 if rows.dtype.kind == "u" else None)


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Raises `UserError` for what a worker finds wrong before the training starts."""
    try:
        yield
    except JobFailed as error:
        raise UserError(error.reason) from None
