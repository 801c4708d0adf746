"""Which experiments run on Flower."""

from __future__ import annotations

from typing import Any

from coordinator.document_checks import Section
from coordinator.errors import UserError
from coordinator.experiments import device_classes
from coordinator.experiments.schema import Experiment
from strategies import own, presets


def require_possible(experiment: Experiment) -> None:
    """Refuses what only a simulation of our own can do.

    Raises:
        UserError: naming every such key.
    """
    simulated = experiment.simulation
    problems = [
        f"{key} = {value!r}: {why}"
        for key, value, why in (
            ("model.adapt", experiment.model.adapt, "the frozen backbone does not travel to Flower's nodes"),
            (
                "strategy.name",
                device_classes.are_used(experiment) and experiment.strategy.name,
                "Flower's nodes all train the same model",
            ),
            ("strategy.name", _server_strategy(experiment), "Flower's server trains no model in a round"),
            ("simulation.faults", dict(simulated.faults), "Flower's nodes have no made-up faults"),
            ("simulation.attack", simulated.attack and simulated.attack.name, "Flower's nodes are honest"),
            ("simulation.stragglers", _settings(simulated.stragglers), "Flower's nodes do all of their work"),
            ("uplink.code", experiment.uplink.code, "Flower's nodes send their updates as they are"),
            ("downlink.code", experiment.downlink.code, "Flower's nodes get the model as it is"),
            ("privacy", _settings(experiment.privacy), "Flower's nodes send their updates as they are"),
            ("simulation.fine_tune", _settings(simulated.fine_tune), "each node keeps its rows"),
            (
                "federation.mode",
                "async" if experiment.federation.mode == "async" else None,
                "rounds on Flower are synchronous",
            ),
            (
                "strategy.name",
                _personal(experiment.strategy.name),
                "a node keeps nothing, and its own model would leave it",
            ),
            ("strategy.name", _of_flower(experiment), "give the class to the ServerApp of an app of Flower"),
            (
                "federation.relays",
                experiment.federation.relays,
                "Flower's nodes answer to its ServerApp alone",
            ),
            ("simulation.dropout", simulated.dropout, "Flower's nodes answer in real time"),
            ("simulation.engine", _other_engine(experiment), 'Flower\'s nodes train one by one; take "pool"'),
            *(
                (f"simulation.{key}", getattr(simulated, key), "Flower's nodes answer in real time")
                for key in (
                    "speed_spread",
                    "speed",
                    "download",
                    "upload",
                    "availability",
                    "profiles",
                    "replay",
                )
            ),
        )
        if value
    ]
    if problems:
        raise UserError("\n".join(["this experiment cannot run on Flower; leave these keys out:", *problems]))


def _other_engine(experiment: Experiment) -> str:
    engine = experiment.simulation.engine
    return "" if engine == "pool" else engine


def _of_flower(experiment: Experiment) -> str:
    return experiment.strategy.name if own.is_flower(experiment.strategy.name) else ""


def _server_strategy(experiment: Experiment) -> str:
    name = experiment.strategy.name
    return name if presets.uses_server_data(name) else ""


def _personal(strategy: str) -> str:
    return strategy if presets.is_personal(strategy) else ""


def _settings(section: Section | None) -> dict[str, Any]:
    return {} if section is None else section.model_dump(exclude_none=True)
