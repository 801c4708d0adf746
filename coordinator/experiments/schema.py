"""The schema of the experiment file: its tables, their keys, types and ranges.

A key's type checks one value; `coordinator.experiments.validation` compares keys with each other. The text below a key is
its help in forms and in the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from coordinator.document_checks import Section
from coordinator.experiments.privacy.section import Privacy
from coordinator.experiments.sections import (
    Attack,
    Downlink,
    EvaluationSection,
    FineTune,
    Local,
    ServerData,
    Stragglers,
    Uplink,
)
from coordinator.model_references import RegisterAs, parse_register_as
from coordinator.scheduling.deployments import Selection
from edge_client.wire import schema as schemas
from edge_client.wire.schema import DataSchema, Scale
from models.datasets import names
from models.tasks import MODEL_KEYS

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


class Categories(Section):
    """Which texts of a table's column are categories of their own: at most the `max` most frequent ones, and none that fewer
    than `minimum_count` training rows have. `fold`: upper case and blanks make no difference.
    """

    max: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Most frequent texts that are categories; the others share one."""
    minimum_count: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Training rows that a text needs to be a category."""
    fold: bool = False
    """Whether upper case and blanks make no difference."""


Moments = Annotated[list[float], Field(min_length=2, max_length=2)]
"""Mean and standard deviation."""


class DataSection(Section):
    """A data set, and how to read it. `public`: rows may be published, as those of public data sets."""

    dataset: str = "digits"
    """A shipped data set, csv, npz, package.module:load, or a name that the devices know."""
    path: str | None = None
    """The file of csv and npz, or of a name that the devices know."""
    label: str | None = None
    """Column to predict."""
    split: str | None = None
    """Column of train and test; without one 20 % of each site is held out."""
    features: list[str] | None = None
    """Columns that are inputs; default: all others."""
    exclude: list[str] | None = None
    """Columns that are no input."""
    scale: Scale | None = None
    """How numbers are scaled: by all sites, each site alone, fixed moments, or not."""
    fixed: dict[str, Moments] | None = None
    """Mean and deviation of each column of numbers, with scale = "fixed"."""
    units: dict[str, str] | None = None
    """Units of columns, for people."""
    categories: Categories | None = None
    """Which texts of a column are categories."""
    length: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Tokens in a row."""
    vocab: Annotated[int, Field(ge=3, le=1_000_000)] | None = None
    """Word ids."""
    public_samples: Annotated[int, Field(ge=0)] = 0
    """Training rows that no client gets."""
    public: bool = False
    """Whether its rows may be published."""

    @property
    def loaded_as(self) -> str:
        """The data set that is read here."""
        return self.dataset

    @property
    def is_public(self) -> bool:
        """Whether its rows may be published."""
        return self.public or names.is_public(self.dataset, self.path)


class Data(DataSection):
    label: str = "label"
    """Column to predict."""
    positive: str | None = None
    """The class that sensitivity, AUC and F1 are of; default: the second."""
    site: str | None = None
    """Column with the site of each row."""
    encoding: str | None = None
    """Of the text; default: UTF-8, or UTF-16 with a byte order mark."""
    partition: str | None = None
    """How rows are dealt out in a simulation: iid, shards(2), dirichlet(0.3), natural."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Of the held-out rows and the partition; default: that of the experiment."""
    input_shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=4)] | None = None
    """Shape of a row that only devices hold."""
    classes: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    """Number of classes of rows that only devices hold."""
    input_dtype: Literal["float32", "int32"] | None = None
    """Type of the numbers of a row that only devices hold."""
    task: Literal["classification", "next_token", "regression"] | None = None
    """What the model predicts."""
    # A field named `schema` would hide a method of pydantic's.
    data_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """The data schema of a table that only devices hold."""

    @property
    def loaded_as(self) -> str:
        """The data set that is read here: of a name that the devices know it is what the file `path` holds."""
        return names.loaded_as(self.dataset, self.path)

    @property
    def to_load(self) -> dict[str, Any]:
        """All keys, as `models.datasets.from_settings` reads them."""
        return {**self.model_dump(), "dataset": self.loaded_as}

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

    model_config = ConfigDict(
        extra="allow", strict=True, serialize_by_alias=True, use_attribute_docstrings=True
    )

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ModelSection(OpenSection):
    """A model by `name`, with its options."""

    name: str | None = None
    """A model of the catalog, package.module:build, or a .keras file."""

    def describe(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        """The description from which workers and devices build the model. `shape`: the `MODEL_KEYS` of the data."""
        return {"name": self.name, "options": self.options, **{key: shape[key] for key in MODEL_KEYS}}


class Model(ModelSection):
    """`name`, `init`, `adapt` and `register`; every other key is an option of the model."""

    init: str | None = None
    """Params to start from: a file, a folder in Hugging Face's layout, or a version, such as digits:3; default: fresh ones from the seed."""
    adapt: str | None = None
    """Train few params on top of init: head, lora(rank) or lora(rank, alpha)."""
    # A field named `register` would hide the method of that name that every abstract class has.
    registered: str | None = Field(default=None, alias="register")
    """Model in the registry of which the result becomes a version, such as digits@candidate."""

    @property
    def register_as(self) -> RegisterAs | None:
        """The model in the registry of which the result becomes a version, or None."""
        return None if self.registered is None else parse_register_as(self.registered)


class Federation(Section):
    clients: Annotated[int, Field(ge=1)] | None = None
    """Clients in a simulation; default: 20, or one per site."""
    clients_per_round: Annotated[int, Field(ge=1)] | None = None
    """Accepted updates that close a round."""
    rounds: Annotated[int, Field(ge=1)] = 30
    """Number of rounds."""
    early_stop: Annotated[int, Field(ge=0)] = 0
    """End after so many scored rounds without a better one by `metric`; 0: never."""
    keep: Literal["last", "best"] = "last"
    """Which model is the result: of the last round, or of the best one by `metric`."""
    metric: Literal["loss", "auc", "f1", "balanced_accuracy", "r2"] = "loss"
    """What `early_stop` and `keep` compare: the test loss, or a figure of the held-out rows."""
    runtimes: Annotated[dict[Runtime, Annotated[float, Field(gt=0, le=1e9)]], Field(min_length=1)] = {
        "litert": 0.5,
        "torch": 0.5,
    }
    """Runtimes of clients with their shares; on devices those that are allowed."""
    mode: Literal["sync", "async"] | None = None
    """Whether a round waits for its clients, or steps at every `buffer` updates; default: what the strategy needs, else sync."""
    buffer: Annotated[int, Field(ge=1)] | None = None
    """Accepted updates in a step of an asynchronous run; default: half of `concurrency`."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Clients at work at a time in an asynchronous run; default: `clients_per_round`."""
    staleness: str | None = None
    """What a stale update counts for: constant, polynomial(0.5), hinge(10, 4)."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Most versions that an update may be behind; default: any number."""
    over_select: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Clients that a round selects, as a multiple of those it needs."""
    deadline_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Of a round, in seconds."""
    min_updates: Annotated[int, Field(ge=1)] = 1
    """With fewer at the deadline the round leaves the model unchanged."""
    max_examples: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """An update that claims more is rejected; default: no limit."""
    weight_cap: Annotated[float, Field(ge=0, le=1e9)] = 10.0
    """Most that an update counts for, in medians of its cohort's examples; 0: no cap."""
    outlier_factor: Annotated[float, Field(ge=0, le=1e30)] = 100.0
    """An update is left out if its steps are longer by this factor; 0: no bound."""
    relays: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Relays between clients and server in a simulation: each folds the updates of an equal part of a round; 0: none."""
    malicious_relays: Annotated[int, Field(ge=0)] | None = None
    """Results of relays that a robust strategy bears; default: 1."""

    @property
    def needs_scores(self) -> bool:
        """Whether the rounds' scores decide when the run ends, or which model it gives."""
        return self.early_stop > 0 or self.keep == "best"


class StrategySection(OpenSection):
    """`name`; every other key is an option of the strategy."""

    name: str = "fedavg"
    """How updates become the next model; package.module:Class is your own, flower:package.module.Class one for Flower."""


def _modern_engine(name: object) -> object:
    """Experiments of earlier versions call the pool "processes"."""
    return "pool" if name == "processes" else name


def _number_as_text(value: object) -> object:
    """A distribution may be given as a plain number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Distribution = Annotated[str, BeforeValidator(_number_as_text)]
"""In the notation of `coordinator.experiments.distributions`."""


class Simulation(Section):
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Worker processes; 0: one per core, or one for the engine cuda."""
    engine: Annotated[
        Literal["auto", "pool", "stacked", "compiled", "cuda"], BeforeValidator(_modern_engine)
    ] = "auto"
    """How torch clients train: one by one (pool), as one batch (stacked; cuda: on a GPU), or by compiled steps; auto goes by the model."""
    seconds_per_step: Annotated[float, Field(gt=0)] = 0.05
    """Virtual seconds of a local step on a client of average speed."""
    speed_spread: Annotated[float, Field(ge=0, le=5)] = 0.0
    """Standard deviation of the logarithm of client speeds."""
    speed: Distribution | None = None
    """Speeds of clients, 1 on average: a number, uniform(0.5, 2), lognormal(1, 0.5); or speed_spread, not both."""
    download: Distribution | None = None
    """Bytes a second that a client receives: a number, uniform(low, high), lognormal(median, sigma); default: no limit."""
    upload: Distribution | None = None
    """Bytes a second that a client sends; default: no limit."""
    availability: Distribution | None = None
    """Share of virtual time in which a client is there, above 0 and up to 1; default: always."""
    availability_period_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Virtual seconds after which times of presence repeat; default: a day."""
    profiles: str | None = None
    """A CSV with a line for each client: client, and any of speed, download, upload, dropout and available."""
    replay: str | None = None
    """The trace of a recorded run, which decides who answers when and with what outcome."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a client does not answer in a round."""
    faults: dict[Fault, Annotated[int, Field(ge=1)]] = {}
    """Number of clients with each fault, in every round."""
    attack: Attack | None = None
    """What malicious clients do, such as { name = "sign_flip", clients = 4 }; default: there are none."""
    stragglers: Stragglers | None = None
    """Clients that do a part of their local work, such as { share = 0.9, partial = "drop" }; default: there are none."""
    names: list[Annotated[str, Field(min_length=1, max_length=200)]] | None = None
    """Of all clients, in order; default: generated."""
    local_baseline: Literal["auto", "on", "off"] = "auto"
    """Whether every client is trained alone too, to compare."""
    fine_tune: FineTune | None = None
    """Trains the final model on each client's rows, such as { epochs = 2 }, and scores it on its held-out ones; default: not."""


class Devices(Section):
    """Keys of a real fleet: which devices take part, and when they evaluate. `classes` are device classes."""

    groups: list[str] = []
    """Only devices enrolled into one of these groups; empty: any."""
    labels: dict[str, str] = {}
    """Only devices that report all of these, such as { site = "north" }."""
    classes: list[str] = []
    """Only devices of one of these classes, such as ["gateway"]."""
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    """Least memory of a training process, in bytes."""
    patience_seconds: Annotated[float, Field(ge=0, le=86400)] = 60.0
    """How long a round waits for enough devices before it begins with those present."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Rounds between evaluations on the devices' own held-out rows; 0: never."""
    evaluate_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """How long such an evaluation waits for the devices."""

    @property
    def selection(self) -> Selection:
        """Which devices a run accepts."""
        return Selection(tuple(self.groups), dict(self.labels), tuple(self.classes), self.memory_bytes)


class Experiment(Section):
    name: str = ""
    """Of the run; default: the data set's."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 7
    """Of initial params, cohorts, batches and faults."""
    record: str | None = None
    """File in the run's folder that gets the trace, such as trace.csv, which simulation.replay replays; default: none."""
    data: Data = Data()
    server_data: ServerData = ServerData()
    model: Model = Model()
    federation: Federation = Federation()
    local: Local = Local()
    strategy: StrategySection = StrategySection()
    uplink: Uplink = Uplink()
    downlink: Downlink = Downlink()
    privacy: Privacy = Privacy()
    evaluation: EvaluationSection = EvaluationSection()
    simulation: Simulation = Simulation()
    devices: Devices = Devices()

    @property
    def data_seed(self) -> int:
        """The seed of the rows: which are held out, how they are partitioned, and synthetic ones themselves."""
        return self.seed if self.data.seed is None else self.data.seed

    @model_serializer(mode="wrap")
    def _leave_out_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the table `[privacy]` if it is empty, as runs of before are."""
        document: dict[str, Any] = handler(self)
        if not self.privacy.is_given:
            document.pop("privacy", None)
        return document
