"""The checks of an experiment that a single key's type cannot express: unknown names, ranges, contradictions between keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from coordinator.errors import UserError
from coordinator.experiments import codes, device_schema, engines, simulated
from coordinator.experiments.schema import DataSection, Experiment, Federation, FleetKind
from coordinator.json_values import is_finite
from coordinator.model_references import parse_register_as
from models import adaptation, catalog, user_code
from models.datasets import names
from models.datasets.dataset import DataError
from models.datasets.partitioners import parse_partition
from strategies import presets
from strategies.suggestions import suggest

UNSCORED = (
    "the coordinator has no rows of its own to score the model on, and devices.evaluate_every is 0; set it, such as "
    "devices.evaluate_every = 1"
)
"""Why the rounds of a run on devices have no score."""

TABLE_KEYS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("site", "split", "features", "exclude", "encoding", "scale", "fixed", "units", "categories"), ("csv",)
)
"""The keys of [data] that are for tables, each with the data sets that it is for."""

_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "path": ("csv", "npz"),
    **TABLE_KEYS,
    "length": ("shakespeare", "phrasebank"),
    "vocab": ("phrasebank",),
}


def find_model_problems(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the `[model]` table: an unknown model, unknown or invalid options.

    A user's own model, and one from the entry-point group, is checked in a worker, which may import its framework.
    """
    entry = catalog.MODELS.get(name)
    if entry is None:
        for key, value in options.items():
            if not is_finite(value):
                yield f"model.{key} = {value!r}: expected finite numbers"
        if not user_code.is_own(name) and name not in _installed("fedloop.models"):
            yield (
                f"model.name = {name!r} is unknown{suggest(name, catalog.MODELS)}; known: "
                f"{', '.join(catalog.MODELS)}; your own is given as package.module:build, or as a .keras file"
            )
        return
    try:
        entry.options.model_validate(options)
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                known = list(entry.options.model_fields)
                yield f"model.{key} is not an option of {name}{suggest(key, known)}; its options: {', '.join(known) or 'none'}"
            else:
                yield f"model.{key} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _installed(group: str) -> set[str]:
    """Names of the entry points of a group."""
    from importlib.metadata import entry_points

    return {entry.name for entry in entry_points(group=group)}


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of an experiment with its defaults filled in."""
    yield from _data_problems(experiment, fleet)
    yield from _model_problems(experiment)
    local, model, federation = experiment.local, experiment.model, experiment.federation
    if local.epochs is not None and local.steps is not None:
        yield f"local.epochs = {local.epochs} and local.steps = {local.steps} are both set; keep one of them"
    yield from _federation_problems(federation)
    yield from _evaluation_problems(experiment, fleet)
    yield from simulated.find_problems(experiment)
    yield from codes.find_problems(experiment, fleet)
    if fleet == "simulated":
        yield from engines.find_problems(
            experiment.simulation.engine, model.name or "", model.adapt, federation.runtimes, federation.mode
        )
        strategy = experiment.strategy.name
        yield from engines.rule_problems(
            experiment.simulation.engine, strategy, presets.client_rule(strategy)
        )


def _federation_problems(federation: Federation) -> Iterator[str]:
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
    if federation.metric != "loss" and not federation.needs_scores:
        yield (
            f'federation.metric = {federation.metric!r} is what federation.keep = "best" and federation.early_stop compare; '
            "set one of them"
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


def _evaluation_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    evaluation, data = experiment.evaluation, experiment.data
    if fleet != "devices" or not data.is_described or not dataset_name_problem(data.loaded_as):
        return
    if evaluation.sample is not None:
        yield (
            f"evaluation.sample = {evaluation.sample} draws from the coordinator's held-out rows, and it has none of data.dataset = "
            f"{data.dataset!r}; devices score on all of theirs (devices.evaluate_every); leave it out"
        )
    if evaluation.every > 1:
        yield (
            f"evaluation.every = {evaluation.every} is about the coordinator's held-out rows, and it has none of data.dataset = "
            f"{data.dataset!r}; take devices.evaluate_every = {evaluation.every}"
        )


def _data_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    data = experiment.data
    if data.data_schema is not None and (schema_problems := list(device_schema.find_problems(data, fleet))):
        yield from schema_problems
        return
    if (data.input_shape is None) != (data.classes is None):
        yield "data.input_shape and data.classes describe the rows together; give both, or neither"
    if (problem := dataset_name_problem(data.loaded_as)) and not (fleet == "devices" and data.is_described):
        more = "; for data that only devices hold give data.schema, or data.input_shape and data.classes, too"
        yield f"data.dataset: {problem}{more if fleet == 'devices' else ''}"
    elif (
        problem
        and not experiment.devices.evaluate_every
        and (unscored := score_problem(experiment.federation, UNSCORED))
    ):
        yield unscored
    try:
        parse_partition(data.partition or "")
    except DataError as error:
        yield f"data.partition: {error}"
    if data.task == "regression":
        yield from _regression_problems(experiment, fleet)
    if data.loaded_as in _OWN_KEYS["path"] and data.path is None:
        yield f'data.dataset = "{data.dataset}" needs data.path, the file to read'
    yield from find_table_problems(data)
    yield from own_key_problems(data, _OWN_KEYS)


def find_table_problems(data: DataSection) -> Iterator[str]:
    """One sentence for each contradiction between the keys that say how a table is scaled."""
    if (data.fixed is not None) != (data.scale == "fixed"):
        yield 'data.scale = "fixed" and data.fixed, mean and deviation of each column of numbers, need each other'
    for column, (_, deviation) in (data.fixed or {}).items():
        if deviation <= 0:
            yield f"data.fixed: the deviation of {column!r} is {deviation:g}, expected more than 0"


def _regression_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    data = experiment.data
    if fleet == "devices" and data.is_described and data.data_schema is None:
        yield (
            'data.task = "regression" needs data of the coordinator\'s own, whose training rows scale the labels, or a '
            "data.schema with label_scale; leave data.input_shape and data.classes out"
        )
    if data.loaded_as in names.NAMES and data.loaded_as != "csv":
        yield f'data.task = "regression" is for csv and loaders of your own, but data.dataset = {data.dataset!r} has classes'


def score_problem(federation: Federation, blocking_reason: str) -> str | None:
    """A sentence if a key needs the rounds' scores. `blocking_reason`: the reason why there are none."""
    if not federation.needs_scores:
        return None
    key = f"early_stop = {federation.early_stop}" if federation.early_stop else f'keep = "{federation.keep}"'
    by = "the test losses" if federation.metric == "loss" else f"{federation.metric} (federation.metric)"
    return f"federation.{key} compares {by} of the rounds, but {blocking_reason}"


def own_key_problems(data: Any, own_keys: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """One sentence for each key of a table `data` that is not for its data set. `own_keys`: key -> data sets that it is for."""
    for key, datasets in own_keys.items():
        if (value := getattr(data, key)) is not None and data.loaded_as not in datasets:
            yield f"data.{key} = {value!r} is for {' and '.join(datasets)}, but data.dataset = {data.dataset!r}"


def dataset_name_problem(dataset: str) -> str | None:
    """Why the coordinator cannot load a data set of this name, or None if it can try."""
    try:
        names.check_name(dataset)
    except DataError as error:
        return str(error)
    return None


def _model_problems(experiment: Experiment) -> Iterator[str]:
    model, name = experiment.model, experiment.model.name or ""
    yield from find_model_problems(name, model.options)
    yield from _adapt_problems(experiment)
    if model.registered is not None:
        try:
            parse_register_as(model.registered)
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


def _adapt_problems(experiment: Experiment) -> Iterator[str]:
    how = experiment.model.adapt
    if how is None:
        return
    yield from adaptation.problems(how, experiment.model.init)
    if "tensorflow" in experiment.federation.runtimes:
        yield (
            f"federation.runtimes asks for tensorflow, but model.adapt = {how!r} trains in: litert, torch; "
            "leave tensorflow out"
        )
