"""Device classes of a federation, and what goes with them. Under HeteroFL each trains a width of the model, under FedDF a model of its
own (`coordinator.experiments.by_strategy.architectures`).

    [strategy]
    name = "heterofl"
    classes = { full = 1.0, half = 0.5, quarter = 0.25 }
    shares = { full = 0.2, half = 0.3, quarter = 0.5 }

With `memory_mib = { full = 1024, half = 512, quarter = 0 }` instead of shares, memory decides: that of each client in
`simulation.profiles`, and on devices what each offers for training.

A class of width 1 trains the model itself, any other one a narrower variant (`models.widths`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.experiments.by_strategy import architectures
from models import widths
from strategies.algorithms.heterofl import HeteroFL

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, FleetKind

STRATEGY = "heterofl"
RUNTIMES = HeteroFL.runtimes


def are_used(experiment: Experiment) -> bool:
    """Whether the clients of a run train models of different widths or architectures."""
    return experiment.strategy.name == STRATEGY or architectures.are_used(experiment)


def names_of(experiment: Experiment) -> tuple[str, ...]:
    """The classes, the most demanding first; none if all clients train the same model."""
    return tuple(classes_of(experiment) or architectures.classes_of(experiment))


def classes_of(experiment: Experiment) -> dict[str, float]:
    """Width by class under HeteroFL, the widest first; otherwise empty."""
    if experiment.strategy.name != STRATEGY:
        return {}
    classes: Mapping[str, float] = experiment.strategy.options["classes"]
    return dict(sorted(classes.items(), key=lambda each: (-each[1], each[0])))


def shares_of(experiment: Experiment) -> dict[str, float]:
    """Share of the clients by class; they need not add up to 1."""
    return experiment.strategy.options["shares"] or dict.fromkeys(names_of(experiment), 1.0)


def class_of(memory_mib: float, classes: Iterable[str], least_mib: Mapping[str, float]) -> str | None:
    """The first class that a client with so much memory can have, None if there is none. `classes`: as `names_of`."""
    return next((name for name in classes if memory_mib >= least_mib[name]), None)


def describe_narrower(experiment: Experiment, model: Mapping[str, Any], width: float) -> dict[str, Any]:
    """The description of what a class of this width trains. `model`: that of the whole model."""
    options = {"base": model["name"], "base_options": model["options"], "width": width}
    return {**model, "name": widths.MODEL, "options": options}


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of a run whose `strategy.classes` and `strategy.shares` have the right types."""
    if not are_used(experiment):
        return
    if experiment.strategy.name == STRATEGY:
        yield from _width_problems(experiment, classes_of(experiment))
    classes, shares = names_of(experiment), experiment.strategy.options["shares"]
    if shares and shares.keys() != set(classes):
        yield (
            f"strategy.shares = {_table(shares)} needs a share for each of strategy.classes: {', '.join(classes)}"
        )
    yield from _memory_problems(experiment, classes, fleet)
    clients = experiment.federation.clients
    if clients is not None and clients < len(classes):
        yield f"strategy.classes has {len(classes)} classes, but federation.clients = {clients}; expected a client of each"
    yield from _combinations(experiment, fleet)
    if fleet == "devices" and experiment.local.keep_moments and experiment.strategy.name == STRATEGY:
        yield (
            f"local.keep_moments = true does not go with strategy.name = {STRATEGY!r} on devices: moments are of one width, and a device "
            "whose memory changes changes its class; set it to false"
        )


def _width_problems(experiment: Experiment, classes: Mapping[str, float]) -> Iterator[str]:
    """Problems of the widths, of the model, and of runtimes that train narrower models."""
    if 1.0 not in classes.values():
        yield (
            f"strategy.classes = {_table(classes)}: no class has width 1, so nobody would train the whole model; "
            "give one of them 1, and the model the size that it trains"
        )
    yield from _model_problems(experiment, classes)
    for runtime in experiment.federation.runtimes:
        if runtime not in RUNTIMES:
            yield (
                f"federation.runtimes asks for {runtime}, but strategy.name = {STRATEGY!r} trains narrower models in: "
                f"{', '.join(RUNTIMES)}; leave {runtime} out"
            )


def _memory_problems(experiment: Experiment, classes: Sequence[str], fleet: FleetKind) -> Iterator[str]:
    """Problems of `strategy.memory_mib`."""
    options = experiment.strategy.options
    least: Mapping[str, float] = options["memory_mib"]
    if not least:
        if fleet == "devices" and experiment.strategy.name == STRATEGY:
            yield (
                f"strategy.name = {STRATEGY!r} on devices needs strategy.memory_mib, the memory from which a device is in each of "
                f"strategy.classes: {', '.join(classes)}"
            )
        return
    key = f"strategy.memory_mib = {_table(least)}"
    if least.keys() != set(classes):
        yield f"{key} needs the memory of each of strategy.classes: {', '.join(classes)}"
        return
    ordered = [least[name] for name in classes]
    if ordered != sorted(ordered, reverse=True):
        yield f"{key}: a wider class needs more memory, and in the order of their widths these are {', '.join(classes)}"
    if options["shares"]:
        yield f"{key} and strategy.shares both say which clients have which class; keep one of them"
    if fleet != "devices" and experiment.simulation.profiles is None:
        yield f"{key} needs the memory of each client: give simulation.profiles, a file with the columns client and memory_mib"


def _model_problems(experiment: Experiment, classes: Mapping[str, float]) -> Iterator[str]:
    """Problems of the model; at most one, because the others follow from it."""
    name, options = experiment.model.name or "", experiment.model.options
    built: dict[str, str] = {}
    for label, width in classes.items():
        try:
            text = str(widths.scale_options(name, options, width))
        except widths.NoNarrowerModel as error:
            yield f"model.name = {error}, as strategy.name = {STRATEGY!r} needs"
            return
        except (KeyError, TypeError, ValueError):  # options that are reported elsewhere
            return
        if text in built:
            yield (
                f"strategy.classes = {_table(classes)}: {built[text]} and {label} train the same model, {text}; "
                "leave one out, or take a wider model"
            )
            return
        built[text] = label


def _combinations(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """What does not go with clients of different models."""
    simulation, key = experiment.simulation, f"strategy.name = {experiment.strategy.name!r}"
    if fleet == "devices" and experiment.strategy.name != STRATEGY:
        yield f"{key} works in simulations only: devices of a run train one architecture, of one width or of several; take another strategy"
        return
    if experiment.model.adapt is not None and experiment.strategy.name == STRATEGY:
        yield f"model.adapt = {experiment.model.adapt!r} freezes a backbone, of which {key} has no narrower one; leave one of them out"
    if simulation.engine not in ("auto", "pool"):
        yield f'simulation.engine = "{simulation.engine}" trains clients of one model, but {key} gives them several; take "pool"'
    if experiment.federation.relays:
        yield f"federation.relays = {experiment.federation.relays} fold updates of one model, but {key} gives clients several; leave it out"
    if experiment.uplink.code is not None:
        yield f"uplink.code = {experiment.uplink.code!r} is for updates of one model, but {key} gives clients several; leave it out"
    if experiment.downlink.code is not None:
        yield f"downlink.code = {experiment.downlink.code!r} is for clients of one model, but {key} gives them several; leave it out"
    if simulation.attack is not None:
        yield f"simulation.attack is for clients of one model, but {key} gives them several; leave it out"
    if simulation.fine_tune is not None:
        yield f"simulation.fine_tune trains the whole model on every client, which {key} says not all can; leave it out"
    if simulation.local_baseline == "on":
        yield (
            f'simulation.local_baseline = "on" trains the whole model on every client, which {key} says not all can; '
            "leave it out"
        )


def _table(values: Mapping[str, float]) -> str:
    return "{ " + ", ".join(f"{key} = {value:g}" for key, value in values.items()) + " }"
