"""The experiment file: one TOML document that runs in simulation and on a real fleet.

`load(path, sets)` reads the file, applies `--set`, checks everything and reports every bad value at once.
The result is complete: each key has its value, so writing it down (`to_toml`) records the whole experiment.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.errors import UserError
from coordinator.registry.references import RegisterAs, is_version, register_as
from coordinator.sections import described, model_problems, wrong
from models import adaptation, catalog
from models.datasets import DataError, parse_partition, sources
from strategies import presets

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

LIMIT_BYTES = 4 * 2**20
"""Largest experiment file that is read."""

COHORT = 10
"""Clients per round where the experiment does not say and there are that many."""


class Section(BaseModel):
    """A table of the file; unknown keys are errors, values are never coerced from strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Data(Section):
    dataset: str = "digits"
    path: str | None = None
    label: str = "label"
    site: str | None = None
    split: str | None = None
    features: list[str] | None = None
    length: Annotated[int, Field(ge=1, le=65536)] | None = None
    vocab: Annotated[int, Field(ge=3, le=1_000_000)] | None = None
    partition: str | None = None
    public_samples: Annotated[int, Field(ge=0)] = 0
    input_shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=4)] | None = None
    classes: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    input_dtype: Literal["float32", "int32"] | None = None
    task: Literal["classification", "next_token"] | None = None

    @property
    def is_described(self) -> bool:
        """Whether the file itself says what a row looks like, so that the data need not be at hand."""
        return self.input_shape is not None and self.classes is not None


class Model(BaseModel):
    """`name`, `init`, `adapt` and `register`; every other key is an option of the model."""

    model_config = ConfigDict(extra="allow", strict=True, serialize_by_alias=True)

    name: str | None = None
    init: str | None = None
    adapt: str | None = None
    # a field `register` would hide the method of that name that every abstract class has
    registered: str | None = Field(default=None, alias="register")

    @property
    def register_as(self) -> RegisterAs | None:
        """The model of the registry that the result becomes a version of; None: of none."""
        return None if self.registered is None else register_as(self.registered)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Federation(Section):
    clients: Annotated[int, Field(ge=1)] | None = None
    clients_per_round: Annotated[int, Field(ge=1)] | None = None
    rounds: Annotated[int, Field(ge=1)] = 30
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


class Local(Section):
    epochs: Annotated[int, Field(ge=1)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 16
    lr: Annotated[float, Field(gt=0)] | None = None


class StrategySection(BaseModel):
    """`name`; every other key is an option of the strategy."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = "fedavg"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Simulation(Section):
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    engine: Literal["auto", "processes"] = "auto"
    seconds_per_step: Annotated[float, Field(gt=0)] = 0.05
    speed_spread: Annotated[float, Field(ge=0, le=5)] = 0.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    faults: dict[Fault, Annotated[int, Field(ge=1)]] = {}
    names: list[Annotated[str, Field(min_length=1, max_length=200)]] | None = None


class Devices(Section):
    """Of a real fleet: which devices take part, and when they evaluate. `classes` are device classes."""

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

    def to_toml(self) -> str:
        """The experiment as a TOML document; keys without a value are left out."""
        return tomlkit.dumps(self.model_dump(mode="json", exclude_none=True))


# What goes without saying, by data set: model, partition, local learning rate. Transformers need a larger one
# with plain SGD: at 0.05 they stay at the majority class for many rounds.
_DEFAULTS: dict[str, tuple[str, str, float]] = {
    "digits": ("cnn", "dirichlet(0.3)", 0.05),
    "mnist": ("cnn", "dirichlet(0.3)", 0.05),
    "shakespeare": ("charlm", "natural", 0.3),
    "phrasebank": ("textcls", "dirichlet(0.3)", 0.2),
}
_OTHER_DEFAULTS = ("mlp", "dirichlet(0.3)", 0.05)

# Which data sets have keys of their own, and the defaults of those that need one.
_TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "shakespeare": {"length": 32},
    "phrasebank": {"length": 32, "vocab": 2048},
}
_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "path": ("csv",),
    "site": ("csv",),
    "split": ("csv",),
    "features": ("csv",),
    "length": ("shakespeare", "phrasebank"),
    "vocab": ("phrasebank",),
}


def load(path: Path | None, sets: Iterable[str] = ()) -> Experiment:
    """The experiment of a file (or all defaults) after `--set key=value` settings.

    Raises:
        UserError: naming the file, every bad key with its value, and what was expected.
    """
    document = changed(read(path) if path else {}, sets)
    return resolve(document, str(path) if path else "experiment")


def changed(document: dict[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """The document after `--set key=value` settings, in place."""
    for setting in sets:
        _apply(document, setting)
    return document


def read(path: Path) -> dict[str, Any]:
    """A TOML file as nested dicts."""
    try:
        with path.open("rb") as file:  # which may be a pipe, <(…)
            content = file.read(LIMIT_BYTES + 1)
        if len(content) > LIMIT_BYTES:
            raise UserError(f"{path}: has more than {LIMIT_BYTES:,} bytes; expected an experiment in TOML")
        return parsed(content.decode("utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such experiment file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def parsed(text: str, source: str) -> dict[str, Any]:
    """TOML text as nested dicts."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source}: not valid TOML: {error}") from None


def resolve(document: Mapping[str, Any], source: str, fleet: FleetKind = "simulated") -> Experiment:
    """A checked experiment with every default filled in.

    On a fleet of devices `data.dataset` may be any name that the devices know, if the file describes its rows.

    Raises:
        UserError: listing every problem at once; `source` is what the messages call the document.
    """
    try:
        experiment = Experiment.model_validate(document)
    except ValidationError as error:
        raise wrong(source, [described(item, Experiment) for item in error.errors()]) from None
    experiment = _with_defaults(experiment, fleet)
    problems = list(_problems(experiment, fleet))
    if problems:
        raise wrong(source, problems)
    return experiment


def _with_defaults(experiment: Experiment, fleet: FleetKind) -> Experiment:
    data, model, federation, local = (
        experiment.data,
        experiment.model,
        experiment.federation,
        experiment.local,
    )
    model_name, partition, lr = _DEFAULTS.get(data.dataset, _OTHER_DEFAULTS)
    data = data.model_copy(update={"partition": data.partition or partition})
    if data.path is not None:
        data = data.model_copy(update={"path": _absolute(data.path)})
    text = {
        key: value
        for key, value in _TEXT_DEFAULTS.get(data.dataset, {}).items()
        if getattr(data, key) is None
    }
    data = data.model_copy(update=text)
    name = model.name or model_name
    options = model.options
    if "vocab" in _option_names(name) and data.vocab is not None:
        options = {"vocab": data.vocab, **options}
    model = Model.model_validate(
        {
            "name": name,
            **({"init": _init(model.init, fleet)} if model.init else {}),
            **({"adapt": model.adapt} if model.adapt is not None else {}),
            **({"register": model.registered} if model.registered is not None else {}),
            **_model_options(name, options),
        }
    )
    if federation.clients is None and data.partition != "natural":
        federation = federation.model_copy(update={"clients": 20})
    if federation.clients_per_round is None and federation.clients is not None:
        federation = federation.model_copy(update={"clients_per_round": min(COHORT, federation.clients)})
    if local.lr is None:
        local = local.model_copy(update={"lr": lr})
    if local.epochs is None and local.steps is None:
        local = local.model_copy(update={"epochs": 5})
    simulation = experiment.simulation.model_copy(update={"engine": "processes"})
    try:
        options = presets.checked(experiment.strategy.name, experiment.strategy.options)
    except presets.OptionError:
        options = experiment.strategy.options  # reported by _problems
    strategy = StrategySection.model_validate({"name": experiment.strategy.name, **options})
    return experiment.model_copy(
        update={
            "name": experiment.name or _default_name(data),
            "data": data, "model": model, "federation": federation, "local": local,
            "simulation": simulation, "strategy": strategy,
        }
    )  # fmt: skip


def _init(given: str, fleet: FleetKind) -> str:
    """Only a coordinator has versions; elsewhere it is a file whatever it is called."""
    return given if fleet == "devices" and is_version(given) else _absolute(given)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _default_name(data: Data) -> str:
    return Path(data.path).stem if data.path is not None else re.split(r"\W", data.dataset, maxsplit=1)[0]


def _option_names(name: str) -> Collection[str]:
    entry = catalog.MODELS.get(name)
    return entry.options.model_fields.keys() if entry is not None else ()


def _model_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    entry = catalog.MODELS.get(name)
    if entry is None:
        return given
    try:
        return entry.options.model_validate(given).model_dump()
    except ValidationError:
        return given  # reported by _problems


def _problems(experiment: Experiment, fleet: FleetKind) -> Iterable[str]:
    """Everything wrong that a single key's type cannot tell: unknown names, ranges, contradictions."""
    yield from _data_problems(experiment, fleet)
    yield from _model_problems(experiment)
    federation, local = experiment.federation, experiment.local
    if local.epochs is not None and local.steps is not None:
        yield f"local.epochs = {local.epochs} and local.steps = {local.steps} are both set; keep one of them"
    clients, cohort = federation.clients, federation.clients_per_round
    if clients is not None and cohort is not None and cohort > clients:
        yield (
            f"federation.clients_per_round = {cohort} is more than federation.clients = {clients}; "
            f"expected 1 to {clients}"
        )
    if federation.clients_per_round is not None and federation.min_updates > federation.clients_per_round:
        yield (
            f"federation.min_updates = {federation.min_updates} is more than "
            f"federation.clients_per_round = {federation.clients_per_round}; no round could ever close"
        )
    if 0 < federation.weight_cap < 1:
        yield (
            f"federation.weight_cap = {federation.weight_cap:g} would cap the median client too; expected 1 or more, "
            "or 0: no cap"
        )
    if 0 < federation.outlier_factor < 1:
        yield (
            f"federation.outlier_factor = {federation.outlier_factor:g} would leave the median client out too; expected "
            "1 or more, or 0: no bound"
        )
    names = experiment.simulation.names
    if names is not None and (len(set(names)), len(names)) != (federation.clients or len(names),) * 2:
        yield (
            f"simulation.names holds {len(names)} names, {len(set(names))} of them different; expected one for "
            f"each of the {federation.clients or 'sites as'} clients"
        )
    faulty = sum(experiment.simulation.faults.values())
    if federation.clients is not None and faulty >= federation.clients:
        yield f"simulation.faults names {faulty} faulty clients, but federation.clients = {federation.clients}; leave at least one honest"
    try:
        presets.checked(experiment.strategy.name, experiment.strategy.options)
    except presets.OptionError as error:
        yield f"strategy.{error.option or 'name'}: {error}"


def _data_problems(experiment: Experiment, fleet: FleetKind) -> Iterable[str]:
    data = experiment.data
    if (data.input_shape is None) != (data.classes is None):
        yield "data.input_shape and data.classes describe the rows together; give both, or neither"
    if (problem := name_problem(data.dataset)) and not (fleet == "devices" and data.is_described):
        more = "; for data that only devices hold give data.input_shape and data.classes too"
        yield f"data.dataset: {problem}{more if fleet == 'devices' else ''}"
    try:
        parse_partition(data.partition or "")
    except DataError as error:
        yield f"data.partition: {error}"
    if data.dataset == "csv" and data.path is None:
        yield 'data.dataset = "csv" needs data.path, the table to read'
    for key, datasets in _OWN_KEYS.items():
        if getattr(data, key) is not None and data.dataset not in datasets:
            yield f"data.{key} = {getattr(data, key)!r} is for {' and '.join(datasets)}, but data.dataset = {data.dataset!r}"


def name_problem(dataset: str) -> str | None:
    """Why the coordinator itself cannot load a data set of this name, or None where it can try."""
    try:
        sources.check_name(dataset)
    except DataError as error:
        return str(error)
    return None


def _model_problems(experiment: Experiment) -> Iterable[str]:
    model, name = experiment.model, experiment.model.name or ""
    yield from model_problems(name, model.options)
    yield from _adapt_problems(experiment)
    if model.registered is not None:
        try:
            register_as(model.registered)
        except UserError as error:
            yield f"model.register: {error}"
    entry = catalog.MODELS.get(name)
    if entry is None:
        return
    vocab = model.options.get("vocab")
    if isinstance(vocab, int) and vocab < (experiment.data.vocab or 0):
        yield f"model.vocab = {vocab} is less than data.vocab = {experiment.data.vocab}; word ids would not fit"
    for runtime in experiment.federation.runtimes:
        if runtime not in entry.runtimes:
            yield (
                f"federation.runtimes asks for {runtime}, but model.name = {name!r} has no {runtime} version; "
                f"{name} runs in: {', '.join(entry.runtimes)}"
            )


def _adapt_problems(experiment: Experiment) -> Iterable[str]:
    how = experiment.model.adapt
    if how is None:
        return
    try:
        adaptation.parse(how)
    except adaptation.AdaptationError as error:
        yield f"model.adapt = {error}"
    if experiment.model.init is None:
        yield f"model.adapt = {how!r} needs a trained model to go on from; give its params as model.init"
    if "tensorflow" in experiment.federation.runtimes:
        yield (
            f"federation.runtimes asks for tensorflow, but model.adapt = {how!r} trains in: litert, torch; "
            "leave tensorflow out"
        )


def _apply(document: dict[str, Any], setting: str) -> None:
    """One `--set key=value`: the value is TOML where it parses as TOML, else a string; a table replaces."""
    key, equals, text = setting.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise UserError(f"--set {setting!r} is not of the form key=value, such as --set local.lr=0.1")
    try:
        parsed = tomllib.loads(f"value = {text.strip()}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    # A text of several lines may parse as more keys than ours; it is a string.
    value = parsed["value"] if parsed.keys() == {"value"} else text
    *tables, last = key.strip().split(".")
    for table in tables:
        inner = document.setdefault(table, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {setting!r}: {table} is a value, not a table")
        document = inner
    document[last] = value
