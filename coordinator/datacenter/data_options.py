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
from typing import Annotated, Any, Literal

from pydantic import Field

from coordinator.experiments.schema import ModelSection, Section
from coordinator.experiments.validation import find_model_problems, read_table, to_user_error
from models.datasets.names import is_public

_ENCODING = r"^(characters|bytes|bpe\(\d+\))$"


class Data(Section):
    """The training data.

    Attributes:
        encoding: of a text's tokens, `characters`, `bytes` or `bpe(n)`.
        test_rows: at most so many of the held-out rows are scored; 0: all.
        public_samples: train only on so many rows, which an experiment of the same seed and number withholds from its clients; 0: all.
        public: rows may be published, as those of public data sets.
    """

    dataset: str = "digits"
    path: str | None = None
    label: str | None = None
    split: str | None = None
    features: list[str] | None = None
    length: Annotated[int, Field(ge=1, le=65536)] | None = None
    vocab: Annotated[int, Field(ge=3, le=1_000_000)] | None = None
    encoding: Annotated[str, Field(pattern=_ENCODING)] | None = None
    test_rows: Annotated[int, Field(ge=0)] = 1000
    public_samples: Annotated[int, Field(ge=0)] = 0
    public: bool = False

    @property
    def is_public(self) -> bool:
        """Whether rows of it may be published."""
        return self.public or is_public(self.dataset, self.path)


class Model(ModelSection):
    """The model: `name` and initial params; every other key is an option of the model.

    `init` is a `.safetensors` file, `head` says whether its last module is used too.
    """

    init: str | None = None
    head: Literal["same", "new"] | None = None


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
    data = None
    if isinstance(table, dict) and not (table.get("dataset") or table.get("path")):
        problems.append(f"data.{next(iter(table))} is set, but no data set is named; give --data")
    elif table is not None:
        data = read_table(Data, table, problems, "data.")
    model = read_table(Model, tables.get("model", {}), problems, "model.") or Model()
    if model.name is None and model.options:
        problems.append(f"model.{next(iter(model.options))} is set, but not model.name")
    elif model.name is not None:
        problems += find_model_problems(model.name, model.options)
    if problems:
        raise to_user_error(command, problems)
    return DataOptions(data, model)
