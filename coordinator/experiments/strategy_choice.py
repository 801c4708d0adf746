"""The check of the `[strategy]` table: whether the strategy is known, takes these options, and fits the rounds and their relays."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from coordinator.experiments import asynchrony, codes, device_classes, personalisation
from coordinator.experiments.by_strategy import architectures, server_data
from coordinator.experiments.privacy import secure_aggregation
from coordinator.json_values import is_finite
from models import user_code
from strategies import presets
from strategies.own import GROUP
from strategies.relays import CannotRelay, RelayedRule, add_relays, require_foldable_apart

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, Federation, FleetKind
    from coordinator.experiments.sections import Local
    from strategies.strategy import Strategy


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem. A strategy that is not ours is checked in a worker, which loads it."""
    name, options = experiment.strategy.name, experiment.strategy.options
    yield from _optimizer_problems(experiment, fleet)
    yield from asynchrony.find_problems(experiment, presets.modes(name))
    yield from server_data.find_problems(experiment, fleet, presets.uses_server_data(name))
    yield from _relay_problems(experiment, fleet)
    if is_own_strategy(name):
        for key, value in options.items():
            if not is_finite(value):
                yield f"strategy.{key} = {value!r}: expected finite numbers"
        yield from secure_aggregation.strategy_problems(experiment, None)
        return
    try:
        strategy = presets.get(name, **options)
    except presets.OptionError as error:
        own = "; your own is given as package.module:Class, or by the name that its package installs"
        yield f"strategy.{error.option or 'name'}: {error}{'' if error.option else own}"
        return
    yield from local_problems(strategy, experiment.local)
    yield from _kept_problems(experiment, strategy)
    yield from _momentum_problems(experiment)
    yield from personalisation.find_problems(experiment, strategy, fleet)
    federation = experiment.federation
    if federation.clients_per_round is not None and not federation.relays:
        yield from size_problems(strategy, federation.clients_per_round)
    yield from codes.strategy_problems(experiment, strategy)
    yield from secure_aggregation.strategy_problems(experiment, strategy)
    if found := list(architectures.find_problems(experiment)):
        yield from found  # others follow from them
    else:
        yield from device_classes.find_problems(experiment, fleet)


def local_problems(strategy: Strategy, local: Local) -> Iterator[str]:
    """A sentence for each option of local training that the strategy does not go with."""
    for key, why in strategy.conflicts.items():
        value = getattr(local, key)
        if value and value != "sgd":
            text = repr(value) if isinstance(value, str) else f"{value:g}"
            yield (
                f"local.{key} = {text} does not go with strategy.name = {strategy.name!r}: {why}; leave it out, or take "
                "another strategy"
            )

    if strategy.client_rule.full_batch and (local.epochs is not None or local.steps != 1):
        given = f"epochs = {local.epochs}" if local.epochs is not None else f"steps = {local.steps}"
        yield (
            f"local.{given} does not go with strategy.name = {strategy.name!r}, whose clients take one step over all of their "
            "rows; set local.steps = 1"
        )


def _optimizer_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each key that the optimizer of the clients does not go with, whatever the strategy."""
    local = experiment.local
    if local.optimizer != "adamw":
        for key in ADAMW_KEYS:
            if (value := getattr(local, key)) is not None:
                shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
                yield f'local.{key} = {shown} is for local.optimizer = "adamw", but it is "{local.optimizer}"; leave it out'
        return
    if local.momentum:
        yield (
            f'local.momentum = {local.momentum:g} is for local.optimizer = "sgd"; adamw has local.beta1, the decay of its first '
            "moment"
        )
    for runtime in experiment.federation.runtimes:
        if runtime in _WITHOUT_ADAMW:
            yield (
                f'local.optimizer = "adamw" does not go with federation.runtimes = {{{runtime} = …}}: {_WITHOUT_ADAMW[runtime]}; set '
                "federation.runtimes = { torch = 1 }"
            )
    engine = experiment.simulation.engine
    if fleet == "simulated" and engine in ("stacked", "cuda"):
        yield (
            f'local.optimizer = "adamw" does not go with simulation.engine = "{engine}", whose steps of many clients are plain ones; '
            'take "pool"'
        )
    if local.keep_moments and experiment.federation.mode == "async":
        yield (
            'local.keep_moments = true does not go with federation.mode = "async": what a client keeps counts from the round that '
            "accepts its update; set it to false"
        )


_WITHOUT_ADAMW = {
    "litert": "an artifact returns weights, and the small gradients, by whose size AdamW divides, are lost in their rounding",
    "tensorflow": "a TensorFlow client takes steps of SGD only",
}
"""Runtimes whose clients do not take steps of AdamW, and why."""

ADAMW_KEYS = ("beta1", "beta2", "eps", "weight_decay", "keep_moments")
"""Keys of [local] that are about AdamW."""


def _kept_problems(experiment: Experiment, strategy: Strategy) -> Iterator[str]:
    if experiment.local.keep_moments and strategy.client_rule.has_own_model:
        yield (
            f"local.keep_moments = true does not go with strategy.name = {strategy.name!r}, whose clients train more than one model or "
            "part of one; set it to false"
        )


def _momentum_problems(experiment: Experiment) -> Iterator[str]:
    told, local = experiment.strategy.options.get("local_momentum"), experiment.local.momentum
    if told is not None and told != local:
        yield (
            f"strategy.local_momentum = {told:g} is not local.momentum = {local:g}, by which clients take their steps; leave it out"
        )


def size_problems(strategy: Strategy, cohort: int, relay_count: int = 0) -> Iterator[str]:
    """A sentence if rounds of so many clients are too small for the strategy, with its relays if there are any."""
    if relay_count:
        yield from _relay_size_problems(strategy, relay_count, cohort)
        return
    least = strategy.aggregator.fewest_updates
    if cohort < least:
        yield (
            f"strategy.name = {strategy.name!r} with these options needs {least} or more updates in a round, but "
            f"federation.clients_per_round = {cohort}; of so many it bears strategy.malicious = "
            f"{presets.tolerated(strategy.name, cohort)} at most"
        )


def is_own_strategy(name: str) -> bool:
    """Whether a strategy of this name is not ours: a reference to user code, or an entry point. Loads no code."""
    if name in presets.OPTIONS:
        return False
    return user_code.is_reference(name) or name in {entry.name for entry in entry_points(group=GROUP)}


def with_relays(strategy: Strategy, federation: Federation) -> Strategy:
    """The strategy with the relays of a resolved experiment.

    Raises:
        CannotRelay: it cannot have any.
    """
    if not federation.relays:
        return strategy
    return add_relays(strategy, federation.relays, federation.malicious_relays or 0)


def _relay_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of relays between the clients of a round and the server."""
    federation, name = experiment.federation, experiment.strategy.name
    key = f"federation.relays = {federation.relays}"
    if not federation.relays:
        if federation.malicious_relays is not None:
            yield f"federation.malicious_relays = {federation.malicious_relays} is about relays; give federation.relays too, or leave it out"
        return
    if federation.malicious_relays is not None and not presets.is_robust(name):
        yield (
            f"federation.malicious_relays = {federation.malicious_relays} is for robust strategies, but strategy.name = {name!r}: "
            "one malicious relay changes its mean at will; leave it out"
        )
    if federation.mode == "async":
        yield (
            f'{key} does not go with federation.mode = "async": a relay waits for the clients of a round, and an asynchronous '
            "run has no rounds; leave one of them out"
        )
        return
    if name not in presets.OPTIONS:
        yield f"{key} does not go with strategy.name = {name!r}: a strategy of your own gets every update, and relays do not pass them on"
        return
    try:
        single = presets.get(name, **experiment.strategy.options)
        strategy = with_relays(single, federation)
        if fleet == "devices":
            require_foldable_apart(single)
    except presets.OptionError:
        return  # reported elsewhere
    except CannotRelay as error:
        yield f"{key}: {error}; leave it out, or take another strategy"
        return
    if federation.clients_per_round is not None:
        yield from _relay_size_problems(strategy, federation.relays, federation.clients_per_round)


def _relay_size_problems(strategy: Strategy, count: int, cohort: int) -> Iterator[str]:
    """A sentence if rounds of so many clients are too small for so many relays. `strategy`: with its relays."""
    each, aggregator = cohort // count, strategy.aggregator
    if not isinstance(aggregator, RelayedRule):
        if not each:
            yield f"federation.relays = {count} is more than federation.clients_per_round = {cohort}: a relay would have no client"
        return
    within, across = aggregator.within, aggregator.across
    if each < within.fewest_updates:
        yield (
            f"federation.relays = {count} leaves {each} of federation.clients_per_round = {cohort} to a relay, but strategy.name = "
            f"{strategy.name!r} with strategy.malicious = {within.malicious} needs {within.fewest_updates} or more at each"
        )
    if count < across.fewest_updates:
        yield (
            f"federation.malicious_relays = {across.malicious} needs {across.fewest_updates} or more relays with strategy.name = "
            f"{strategy.name!r}, but federation.relays = {count}; of so many it bears {presets.tolerated(strategy.name, count)} at most"
        )
