"""Checks that a single key's type cannot express: unknown names, ranges, contradictions between keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment, Federation, FleetKind
from coordinator.experiments.validation import find_model_problems
from coordinator.model_references import parse_register_as
from models import adaptation, catalog
from models.datasets import names
from models.datasets.dataset import DataError
from models.datasets.partitioners import parse_partition
from strategies import presets

# Data sets that a key of [data] is for.
_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "path": ("csv",),
    "site": ("csv",),
    "split": ("csv",),
    "features": ("csv",),
    "length": ("shakespeare", "phrasebank"),
    "vocab": ("phrasebank",),
}


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of an experiment with its defaults filled in."""
    yield from _data_problems(experiment, fleet)
    yield from _model_problems(experiment)
    local = experiment.local
    if local.epochs is not None and local.steps is not None:
        yield f"local.epochs = {local.epochs} and local.steps = {local.steps} are both set; keep one of them"
    yield from _federation_problems(experiment.federation)
    yield from _simulation_problems(experiment)
    try:
        presets.resolve_options(experiment.strategy.name, experiment.strategy.options)
    except presets.OptionError as error:
        yield f"strategy.{error.option or 'name'}: {error}"


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


def _simulation_problems(experiment: Experiment) -> Iterator[str]:
    federation = experiment.federation
    names = experiment.simulation.names
    if names is not None and (len(set(names)), len(names)) != (federation.clients or len(names),) * 2:
        yield (
            f"simulation.names holds {len(names)} names, {len(set(names))} of them different; expected one for each "
            + (f"of the clients, federation.clients = {federation.clients}" if federation.clients else "site")
        )
    faulty = sum(experiment.simulation.faults.values())
    if federation.clients is not None and faulty >= federation.clients:
        yield f"simulation.faults names {faulty} faulty clients, but federation.clients = {federation.clients}; leave at least one honest"


def _data_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    data = experiment.data
    if (data.input_shape is None) != (data.classes is None):
        yield "data.input_shape and data.classes describe the rows together; give both, or neither"
    if (problem := dataset_name_problem(data.dataset)) and not (fleet == "devices" and data.is_described):
        more = "; for data that only devices hold give data.input_shape and data.classes too"
        yield f"data.dataset: {problem}{more if fleet == 'devices' else ''}"
    try:
        parse_partition(data.partition or "")
    except DataError as error:
        yield f"data.partition: {error}"
    if data.dataset == "csv" and data.path is None:
        yield 'data.dataset = "csv" needs data.path, the table to read'
    yield from own_key_problems(data, _OWN_KEYS)


def own_key_problems(data: Any, own_keys: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """One sentence for each key of a table `data` that is not for its data set. `own_keys`: key -> data sets that it is for."""
    for key, datasets in own_keys.items():
        if (value := getattr(data, key)) is not None and data.dataset not in datasets:
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
