"""The schema of the experiment file: its tables, their keys, types and ranges.

A key's type checks one value; `coordinator.experiments.validation` compares keys with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import tomlkit
from pydantic import BaseModel, ConfigDict, Field

from coordinator.model_references import RegisterAs, parse_register_as
from edge_client.wire import schema as schemas
from edge_client.wire.schema import DataSchema, Scale
from models.datasets import names

Runtime = Literal["litert", "torch", "tensorflow"]
Fault = Literal[
    "nan",
    "wrong_shape",
    "wrong_dtype",
    "missing_tensor",
    "extra_tensor",
    "stale_base",
    "duplicate",
    "no_examples",
]

FleetKind = Literal["simulated", "devices"]

MODEL_KEYS = ("input_shape", "classes", "input_dtype", "task")
"""Properties of the data that a model depends on."""


class Section(BaseModel):
    """A table of the file; unknown keys are errors, values are never coerced from strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)

    def to_toml(self) -> str:
        """The table, or the whole document, in TOML; keys without a value are left out."""
        return tomlkit.dumps(self.model_dump(mode="json", exclude_none=True))


class Categories(Section):
    """Which texts of a table's column are categories of their own: at most the `max` most frequent ones, and none that fewer
    than `minimum_count` training rows have. `fold`: upper case and blanks make no difference.
    """

    max: Annotated[int, Field(ge=1, le=10_000)] = 100
    minimum_count: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    fold: bool = False


Moments = Annotated[list[float], Field(min_length=2, max_length=2)]
"""Mean and standard deviation."""


class DataSection(Section):
    """A data set, and how to read it. `public`: rows may be published, as those of public data sets."""

    dataset: str = "digits"
    path: str | None = None
    label: str | None = None
    split: str | None = None
    features: list[str] | None = None
    exclude: list[str] | None = None
    scale: Scale | None = None
    fixed: dict[str, Moments] | None = None
    units: dict[str, str] | None = None
    categories: Categories | None = None
    length: Annotated[int, Field(ge=1, le=65536)] | None = None
    vocab: Annotated[int, Field(ge=3, le=1_000_000)] | None = None
    public_samples: Annotated[int, Field(ge=0)] = 0
    public: bool = False

    @property
    def is_public(self) -> bool:
        """Whether its rows may be published."""
        return self.public or names.is_public(self.dataset, self.path)


class Data(DataSection):
    label: str = "label"
    positive: str | None = None
    site: str | None = None
    encoding: str | None = None
    partition: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    input_shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=4)] | None = None
    classes: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    input_dtype: Literal["float32", "int32"] | None = None
    task: Literal["classification", "next_token", "regression"] | None = None
    # A field named `schema` would hide a method of pydantic's.
    data_schema: dict[str, Any] | None = Field(default=None, alias="schema")

    @property
    def is_described(self) -> bool:
        """Whether the file describes the rows, so that the coordinator does not need the data."""
        return self.data_schema is not None or (self.input_shape is not None and self.classes is not None)

    def read_schema(self) -> DataSchema | None:
        """The data schema of a table that only devices hold, if the file gives one.

        Raises:
            InvalidDocument: it is none.
        """
        return (
            None if self.data_schema is None else schemas.from_document(dict(self.data_schema), "data.schema")
        )

    @property
    def described_shape(self) -> dict[str, Any]:
        """The `MODEL_KEYS` of rows that the file describes."""
        defaults: dict[str, Any] = {"input_dtype": "float32", "task": "classification"}
        if (schema := self.read_schema()) is not None:
            defaults = {
                "input_shape": list(schema.input_shape),
                "classes": len(schema.classes) or 1,
                "input_dtype": schema.input_dtype,
                "task": "classification" if schema.label_scale is None else "regression",
            }
        return {key: getattr(self, key) or defaults[key] for key in MODEL_KEYS}


class OpenSection(BaseModel):
    """A table in which every key that is not a field is an option."""

    model_config = ConfigDict(extra="allow", strict=True, serialize_by_alias=True)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ModelSection(OpenSection):
    """A model by `name`, with its options."""

    name: str | None = None

    def describe(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        """The description from which workers and devices build the model. `shape`: the `MODEL_KEYS` of the data."""
        return {"name": self.name, "options": self.options, **{key: shape[key] for key in MODEL_KEYS}}


class Model(ModelSection):
    """`name`, `init`, `adapt` and `register`; every other key is an option of the model."""

    init: str | None = None
    adapt: str | None = None
    # A field named `register` would hide the method of that name that every abstract class has.
    registered: str | None = Field(default=None, alias="register")

    @property
    def register_as(self) -> RegisterAs | None:
        """The model in the registry of which the result becomes a version, or None."""
        return None if self.registered is None else parse_register_as(self.registered)


class Federation(Section):
    clients: Annotated[int, Field(ge=1)] | None = None
    clients_per_round: Annotated[int, Field(ge=1)] | None = None
    rounds: Annotated[int, Field(ge=1)] = 30
    early_stop: Annotated[int, Field(ge=0)] = 0
    keep: Literal["last", "best"] = "last"
    runtimes: Annotated[dict[Runtime, Annotated[float, Field(gt=0, le=1e9)]], Field(min_length=1)] = {
        "litert": 0.5,
        "torch": 0.5,
    }
    mode: Literal["sync"] = "sync"
    over_select: Annotated[float, Field(ge=1, le=10)] = 1.0
    deadline_seconds: Annotated[float, Field(gt=0)] = 600.0
    min_updates: Annotated[int, Field(ge=1)] = 1
    max_examples: Annotated[int, Field(ge=1, le=2**53)] | None = None
    weight_cap: Annotated[float, Field(ge=0, le=1e9)] = 10.0
    outlier_factor: Annotated[float, Field(ge=0, le=1e30)] = 100.0

    @property
    def needs_scores(self) -> bool:
        """Whether the rounds' test losses decide when the run ends, or which model it gives."""
        return self.early_stop > 0 or self.keep == "best"


class Local(Section):
    epochs: Annotated[int, Field(ge=1)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 16
    lr: Annotated[float, Field(gt=0)] | None = None


class StrategySection(OpenSection):
    """`name`; every other key is an option of the strategy."""

    name: str = "fedavg"


class Simulation(Section):
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    engine: Literal["auto", "processes"] = "auto"
    seconds_per_step: Annotated[float, Field(gt=0)] = 0.05
    speed_spread: Annotated[float, Field(ge=0, le=5)] = 0.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    faults: dict[Fault, Annotated[int, Field(ge=1)]] = {}
    names: list[Annotated[str, Field(min_length=1, max_length=200)]] | None = None
    local_baseline: Literal["auto", "on", "off"] = "auto"


class Devices(Section):
    """Keys of a real fleet: which devices take part, and when they evaluate. `classes` are device classes."""

    groups: list[str] = []
    labels: dict[str, str] = {}
    classes: list[str] = []
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    patience_seconds: Annotated[float, Field(ge=0, le=86400)] = 60.0
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    evaluate_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0


class Experiment(Section):
    name: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 7
    data: Data = Data()
    model: Model = Model()
    federation: Federation = Federation()
    local: Local = Local()
    strategy: StrategySection = StrategySection()
    simulation: Simulation = Simulation()
    devices: Devices = Devices()

    @property
    def data_seed(self) -> int:
        """The seed of the rows: which are held out, how they are partitioned, and synthetic ones themselves."""
        return self.seed if self.data.seed is None else self.data.seed
