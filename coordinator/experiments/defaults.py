"""Default values of an experiment that depend on its other values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from coordinator.experiments import codes, device_classes, engines
from coordinator.experiments.privacy import section as private
from coordinator.experiments.privacy import secure_aggregation
from coordinator.experiments.privacy.section import Privacy
from coordinator.experiments.schema import (
    Categories,
    Data,
    Experiment,
    Federation,
    FleetKind,
    Model,
    Simulation,
    StrategySection,
)
from coordinator.experiments.sections import Local, ServerData
from coordinator.model_references import is_version
from coordinator.toml_files import absolute
from edge_client.wire.statistics import MINIMUM_COUNT
from models import catalog
from strategies import presets

MALICIOUS_RELAYS = 1
"""Results of relays that a robust strategy bears by default."""

COHORT = 10
"""Clients per round by default, if there are that many."""

DAY_SECONDS = 86_400.0

STALENESS = "polynomial(0.5)"
"""Of FedBuff, Nguyen 2022, section 5."""

# By data set: model, partition, local learning rate. Transformers need a larger rate with plain SGD: at 0.05 they predict
# only the majority class for many rounds.
_DEFAULTS: dict[str, tuple[str, str, float]] = {
    "digits": ("cnn", "dirichlet(0.3)", 0.05),
    "mnist": ("cnn", "dirichlet(0.3)", 0.05),
    "shakespeare": ("charlm", "natural", 0.3),
    "phrasebank": ("textcls", "dirichlet(0.3)", 0.2),
}
_OTHER_DEFAULTS = ("mlp", "dirichlet(0.3)", 0.05)

ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "keep_moments": False,
}
"""Of AdamW on clients, as in `torch.optim.AdamW`."""

_TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "shakespeare": {"length": 32},
    "phrasebank": {"length": 32, "vocab": 2048},
}


def minimum_count(data: Data) -> int:
    """Rows from which statistics report a count: as for naming a category, but at least 2."""
    return max(2, data.categories.minimum_count) if data.categories else MINIMUM_COUNT


def with_defaults(experiment: Experiment, fleet: FleetKind, *, stored: bool = False) -> Experiment:
    """The experiment with every default filled in. Invalid options stay as they are; the checks report them.

    `stored`: of a run that began earlier, whose table is read as it was.
    """
    model, partition, lr = _DEFAULTS.get(experiment.data.dataset, _OTHER_DEFAULTS)
    data = _data(experiment.data, partition, experiment.data_seed, stored=stored)
    if not stored:
        data = data.model_copy(update=missing(data, table_defaults(data.loaded_as)))
    local = _local(experiment.local, lr, experiment.strategy.name)
    completed = experiment.model_copy(
        update={
            "name": experiment.name or data_name(data.dataset, data.path),
            "data": data,
            "server_data": _server_data(experiment.server_data),
            "model": _model(experiment.model, model, data, fleet),
            "federation": _for_strategy(
                _federation(_private(experiment), data, local, fleet), experiment.strategy.name
            ),
            "local": local,
            "strategy": _strategy(experiment.strategy, local, experiment.privacy),
            "simulation": _simulation(experiment.simulation),
            "uplink": codes.complete(experiment.uplink),
            "downlink": codes.complete(experiment.downlink),
            "privacy": secure_aggregation.complete(private.complete(experiment.privacy, fleet)),
        }
    )
    if experiment.simulation.engine != "auto":
        return completed
    trained, federation = completed.model, completed.federation
    engine = "pool"  # which trains models of several widths, and by gradients of single rows
    if not device_classes.are_used(completed) and completed.privacy.mechanism != "example":
        engine = engines.choose(
            trained.name or "",
            trained.options,
            trained.adapt,
            federation.runtimes,
            federation.mode,
            presets.client_rule(experiment.strategy.name),
            local.optimizer,
        )
        if engine == "auto" and fleet != "simulated":
            engine = "pool"
    return completed.model_copy(
        update={"simulation": completed.simulation.model_copy(update={"engine": engine})}
    )


def _simulation(simulation: Simulation) -> Simulation:
    found: dict[str, Any] = {
        key: absolute(path)
        for key in ("profiles", "replay")
        if (path := getattr(simulation, key)) is not None
    }
    if simulation.availability is not None or simulation.profiles is not None:
        found |= missing(simulation, {"availability_period_seconds": DAY_SECONDS})
    return simulation.model_copy(update=found)


def table_defaults(dataset: str) -> dict[str, Any]:
    """How a table is read by default; nothing of other data."""
    return {"scale": "federated", "categories": Categories()} if dataset == "csv" else {}


def _data(data: Data, partition: str, seed: int, *, stored: bool) -> Data:
    label = data.label
    if stored or "label" not in data.model_fields_set:
        label = (data.data_schema or {}).get("label") or label
    return data.model_copy(
        update={
            "label": label,
            "partition": data.partition or _partition(data, partition),
            "path": None if data.path is None else absolute(data.path),
            "seed": seed,
            **missing(data, _TEXT_DEFAULTS.get(data.dataset, {})),
        }
    )


def _server_data(table: ServerData) -> ServerData:
    return table if table.path is None else table.model_copy(update={"path": absolute(table.path)})


def _partition(data: Data, default: str) -> str:
    if data.site or re.match(r"synthetic\s*\(\s*[\d.]", data.dataset):  # of clients with models of their own
        return "natural"
    return "iid" if data.task == "regression" else default


def _model(model: Model, default: str, data: Data, fleet: FleetKind) -> Model:
    name, options, init = model.name or default, model.options, model.init
    # Only a coordinator has versions; in a simulation `model.init` is always a file.
    if init and not (fleet == "devices" and is_version(init)):
        init = absolute(init)
    with suppress(ValidationError):
        options = complete_options(name, options, data.vocab)
    return Model.model_validate(
        {
            "name": name,
            **({"init": init} if init else {}),
            **model.model_dump(include={"adapt", "registered"}, exclude_none=True),
            **options,
        }
    )


def _federation(federation: Federation, data: Data, local: Local, fleet: FleetKind) -> Federation:
    only_torch = local.optimizer == "adamw" or (fleet != "devices" and data.task == "regression")
    if only_torch and "runtimes" not in federation.model_fields_set:
        federation = federation.model_copy(update={"runtimes": {"torch": 1.0}})
    if federation.clients is None and data.partition != "natural":
        federation = federation.model_copy(update={"clients": 20})
    if federation.clients_per_round is None and federation.clients is not None:
        federation = federation.model_copy(update={"clients_per_round": min(COHORT, federation.clients)})
    return federation


def _private(experiment: Experiment) -> Federation:
    """The table `[federation]`; under differential privacy, or where nobody sees single updates, none is left out for its length by default."""
    federation, table = experiment.federation, experiment.privacy
    if table.mechanism == "example" and "runtimes" not in federation.model_fields_set:
        federation = federation.model_copy(update={"runtimes": {"torch": 1.0}})
    if not (table.mechanism or table.secure_aggregation) or "outlier_factor" in federation.model_fields_set:
        return federation
    return federation.model_copy(update={"outlier_factor": 0.0})


def _for_strategy(federation: Federation, strategy: str) -> Federation:
    """What is missing and depends on the strategy."""
    if federation.relays and presets.is_robust(strategy):
        found = missing(federation, {"malicious_relays": MALICIOUS_RELAYS})
        federation = federation.model_copy(update=found)
    return _asynchrony(federation, strategy)


def _asynchrony(federation: Federation, strategy: str) -> Federation:
    mode = federation.mode or presets.modes(strategy)[0]
    if mode == "sync":
        return federation.model_copy(update={"mode": mode})
    # None if the number of clients is not known yet
    concurrency = federation.concurrency or federation.clients_per_round
    buffer = None if concurrency is None else half(concurrency)
    if presets.mixes_models(strategy):
        buffer = 1  # each model is mixed in as it arrives
    defaults = {"buffer": buffer, "concurrency": concurrency, "staleness": STALENESS}
    return federation.model_copy(update={"mode": mode, **missing(federation, defaults)})


def half(concurrency: int) -> int:
    """The default buffer of an asynchronous run: a step then waits for the faster half of its clients."""
    return max(1, concurrency // 2)


def _local(local: Local, lr: float, strategy: str) -> Local:
    defaults = {"optimizer": "sgd", **ADAMW, **presets.local_defaults(strategy)}
    local = local.model_copy(update=missing(local, {"optimizer": defaults.pop("optimizer")}))
    if local.optimizer == "adamw":
        local = local.model_copy(update=missing(local, defaults))
    if local.lr is None:
        local = local.model_copy(update={"lr": lr})
    if local.epochs is None and local.steps is None:
        steps = {"steps": 1} if presets.client_rule(strategy).full_batch else {"epochs": 5}
        local = local.model_copy(update=steps)
    return local


def _strategy(strategy: StrategySection, local: Local, privacy: Privacy) -> StrategySection:
    options = strategy.options
    if privacy.mechanism not in (None, "example") and "weighting" in presets.OPTIONS.get(strategy.name, {}):
        options = {"weighting": "uniform", **options}  # a client's examples must not scale its update
    if "lipschitz" in presets.OPTIONS.get(strategy.name, {}):
        options = {"lipschitz": 1 / (local.lr or 1), **options}  # Li 2019, section 3.3
    if "local_momentum" in presets.OPTIONS.get(strategy.name, {}):
        options = {"local_momentum": local.momentum, **options}
    with suppress(presets.OptionError):  # also for a strategy that is not ours
        options = presets.resolve_options(strategy.name, options)
    return StrategySection.model_validate({"name": strategy.name, **options})


def missing(section: BaseModel, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those defaults for which a table has no value."""
    return {key: value for key, value in defaults.items() if getattr(section, key) is None}


def complete_options(name: str, options: Mapping[str, Any], vocab: int | None) -> dict[str, Any]:
    """All options of a model of the catalog; those of any other model unchanged. `vocab`: of the data, if it has one.

    Raises:
        ValidationError: an option is wrong.
    """
    entry = catalog.MODELS.get(name)
    if entry is None:
        return dict(options)
    words = {"vocab": vocab} if vocab is not None and "vocab" in entry.options.model_fields else {}
    return entry.options.model_validate({**words, **options}).model_dump()


def data_name(dataset: str, path: str | None) -> str:
    """What a run on this data is called by default."""
    return Path(path).stem if path is not None else re.split(r"\W", dataset, maxsplit=1)[0]
