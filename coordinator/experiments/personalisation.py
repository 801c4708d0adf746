"""What goes together with strategies by which each client has a model of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from strategies.personalisation import ClusterModels, LocalRule, PersonalRule

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, FleetKind
    from strategies.strategy import Strategy


def find_problems(experiment: Experiment, strategy: Strategy, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of an experiment with its defaults filled in."""
    if not isinstance(strategy.client_rule, PersonalRule):
        return
    if isinstance(strategy.client_rule, ClusterModels):
        yield from _cluster_problems(experiment, strategy, fleet)
        return
    name, federation = f"strategy.name = {strategy.name!r}", experiment.federation
    if federation.keep == "best":
        yield (
            f'federation.keep = "best" does not go with {name}: clients keep what they trained last, not what they had in the '
            "best round; leave it out"
        )
    if experiment.simulation.stragglers is not None and any(strategy.client_rule.earlier_epochs):
        yield (
            f"simulation.stragglers does not go with {name}: a straggler would do all of strategy.head_epochs; leave it out"
        )
    if not isinstance(strategy.client_rule, LocalRule):
        return
    if federation.early_stop:
        yield (
            f"federation.early_stop = {federation.early_stop} does not go with {name}: rounds are scored by the global model, whose "
            "local tensors are never trained; leave it out"
        )
    if (attack := experiment.simulation.attack) is not None:
        yield (
            f"simulation.attack.name = {attack.name!r} does not go with {name}: its success is measured on the global model, whose "
            "local tensors are never trained; leave it out"
        )
    if experiment.model.register_as is not None:
        yield f"model.register does not go with {name}: {NO_MODEL}; leave it out"


def _cluster_problems(experiment: Experiment, strategy: Strategy, fleet: FleetKind) -> Iterator[str]:
    """What is about one model does not go with a strategy that has several."""
    federation, simulation = experiment.federation, experiment.simulation
    if fleet == "devices":
        yield (
            f"strategy.name = {strategy.name!r} is for simulations: a release has one model, and devices could not tell which is theirs; "
            "take ditto or fedper"
        )
    scored = "rounds are scored by model 1, which is that of some clients only"
    for key, value, why in (
        ("federation.keep", federation.keep == "best" and federation.keep, scored),
        ("federation.early_stop", federation.early_stop, scored),
        (
            "simulation.attack.name",
            simulation.attack and simulation.attack.name,
            "its success is measured on one model",
        ),
        (
            "simulation.fine_tune.epochs",
            simulation.fine_tune and simulation.fine_tune.epochs,
            "it would train model 1 on every client",
        ),
        ("model.init", experiment.model.init, "its models begin as fresh ones that differ"),
        ("model.register", experiment.model.registered, "a version has one model"),
    ):
        if value:
            yield f"{key} = {value!r} does not go with strategy.name = {strategy.name!r}: {why}; leave it out"


def describe(strategy: Strategy, trainable: Sequence[str]) -> list[str]:
    """A notice for a run on devices whose strategy gives each a model of its own. `trainable`: names of the tensors they train."""
    rule = strategy.client_rule
    if not isinstance(rule, PersonalRule):
        return []
    shared = set(rule.shared(trainable))
    local = [name for name in trainable if name not in shared]
    kept = (
        f"{', '.join(local)}; in the global model they stay as at the start"
        if local
        else "a model of its own"
    )
    return [
        f"{strategy.name}: each device keeps {kept}. devices.evaluate_every scores the devices' own models, the coordinator's rows "
        "the global one"
    ]


LOCAL_STRATEGIES = ("fedper", "fedrep", "fedbn")
"""Strategies whose clients keep tensors, so that the global model is none to use."""
NO_MODEL = "the local tensors of the global model are never trained, so it is no model to use or to register; each client has its own"
