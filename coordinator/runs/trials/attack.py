"""The attack of a simulation: it poisons data, says who forges updates, and measures its success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.experiments.sections import Attack
from coordinator.fleets.attacked import UPDATE_ATTACKS, UpdateAttack
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.workers.attacks import DATA_ATTACKS, choose
from coordinator.workers.evaluation import publish
from coordinator.workers.pool import WorkerPool
from strategies.params import Tensors


def poison(experiment: Experiment, folder: Path, pool: WorkerPool, data_info: Mapping[str, Any]) -> None:
    """Changes the rows of malicious clients in the workspace `folder`, if the attack is one on data.

    Raises:
        UserError: the attack is not for this data.
    """
    attack = experiment.simulation.attack
    if attack is None:
        return
    clients = len(data_info["clients"])
    if attack.clients >= clients:
        raise UserError(
            f"simulation.attack.clients = {attack.clients} of {clients} clients are malicious; leave at least one honest"
        )
    if attack.name not in DATA_ATTACKS:
        return
    if data_info["task"] == "regression":
        raise UserError(
            f"simulation.attack.name = {attack.name!r} is for classes, but the data has quantities"
        )
    described = _describe(attack)
    if described["target"] >= data_info["classes"]:
        raise UserError(
            f"simulation.attack.target = {described['target']} is no class of the data; expected 0 to {data_info['classes'] - 1}"
        )
    request = {
        "kind": "poison",
        "folder": str(folder),
        "seed": experiment.seed,
        "classes": data_info["classes"],
        "parts": choose(clients, attack.clients, experiment.seed),
        "attack": described,
    }
    pool.run_one(request)


def of_updates(experiment: Experiment, clients: Sequence[SimulatedClient]) -> UpdateAttack | None:
    """The attack on updates; None if there is none, or one that only poisons data."""
    attack = experiment.simulation.attack
    if attack is None or (attack.name not in UPDATE_ATTACKS and attack.scale is None):
        return None
    kind = attack.name if attack.name in UPDATE_ATTACKS else "scaling"
    names = frozenset(_names(attack, clients, experiment.seed))
    return UpdateAttack(kind, names, experiment.seed, attack.scale)


def measure(
    experiment: Experiment,
    pool: WorkerPool,
    params: Tensors,
    clients: Sequence[SimulatedClient],
    data_info: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Who attacked, and the share of the rows it is about that the model answers as it wants. `params`: of the model.

    `success` is None for attacks that want no answer in particular: these show in the accuracy.
    """
    attack = experiment.simulation.attack
    if attack is None:
        return None
    names = _names(attack, clients, experiment.seed)
    found: dict[str, Any] = {"name": attack.name, "clients": names, "success": None, "rows": None}
    if attack.name in DATA_ATTACKS:
        publish(pool, params)
        request = {"kind": "attacked", "attack": _describe(attack), "classes": data_info["classes"]}
        values = pool.run_one(request).values
        found |= {
            "success": values["hits"] / values["rows"] if values["rows"] else None,
            "rows": values["rows"],
        }
    return found


def _names(attack: Attack, clients: Sequence[SimulatedClient], seed: int) -> list[str]:
    return [clients[index].name for index in choose(len(clients), attack.clients, seed)]


def _describe(attack: Attack) -> dict[str, Any]:
    """The attack on data, with its defaults."""
    return {
        "name": attack.name,
        "target": 0 if attack.target is None else attack.target,
        "share": 0.5 if attack.share is None else attack.share,
    }
