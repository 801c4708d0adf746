"""The check of the `[strategy]` table: whether the strategy is known, takes these options, and fits the rounds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from coordinator.experiments import asynchrony, personalisation, uplink
from coordinator.json_values import is_finite
from models import user_code
from strategies import presets
from strategies.own import GROUP

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, FleetKind, Local
    from strategies.strategy import Strategy


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem. A strategy that is not ours is checked in a worker, which loads it."""
    name, options = experiment.strategy.name, experiment.strategy.options
    yield from asynchrony.find_problems(experiment, presets.modes(name))
    if is_own_strategy(name):
        for key, value in options.items():
            if not is_finite(value):
                yield f"strategy.{key} = {value!r}: expected finite numbers"
        return
    try:
        strategy = presets.get(name, **options)
    except presets.OptionError as error:
        own = "; your own is given as package.module:Class, or by the name that its package installs"
        yield f"strategy.{error.option or 'name'}: {error}{'' if error.option else own}"
        return
    yield from local_problems(strategy, experiment.local)
    yield from fleet_problems(strategy, fleet)
    yield from personalisation.find_problems(experiment, strategy)
    if (cohort := experiment.federation.clients_per_round) is not None:
        yield from size_problems(strategy, cohort)
    yield from uplink.strategy_problems(experiment.uplink, strategy)


def local_problems(strategy: Strategy, local: Local) -> Iterator[str]:
    """A sentence for each option of local training that the strategy does not go with."""
    for key, why in strategy.conflicts.items():
        if value := getattr(local, key):
            yield (
                f"local.{key} = {value:g} does not go with strategy.name = {strategy.name!r}: {why}; leave it out, or take "
                "another strategy"
            )

    if strategy.client_rule.full_batch and (local.epochs is not None or local.steps != 1):
        given = f"epochs = {local.epochs}" if local.epochs is not None else f"steps = {local.steps}"
        yield (
            f"local.{given} does not go with strategy.name = {strategy.name!r}, whose clients take one step over all of their "
            "rows; set local.steps = 1"
        )


def fleet_problems(strategy: Strategy, fleet: FleetKind) -> Iterator[str]:
    """A sentence if the strategy does not work on a fleet."""
    if strategy.mixes_models and fleet == "devices":
        yield (
            f"strategy.name = {strategy.name!r} is for simulations: it needs the models from which stale clients started, and a "
            "coordinator of devices does not keep them; take fedbuff"
        )


def size_problems(strategy: Strategy, cohort: int) -> Iterator[str]:
    """A sentence if rounds of so many clients are too small for the strategy."""
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
