"""The clients of a simulation: names, runtimes, faults and device classes are dealt out by the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments import device_classes
from coordinator.experiments.schema import Experiment
from coordinator.fleets.client_profiles import read_profiles
from coordinator.fleets.simulated_clients import DeviceClass, SimulatedClient
from coordinator.rounds.plan import generator
from coordinator.workers import faults


def make_clients(
    experiment: Experiment, data_info: Mapping[str, Any], classes: Sequence[DeviceClass] = ()
) -> tuple[SimulatedClient, ...]:
    """A client for each part of the data. `classes`: device classes with their shares; empty: there are none.

    Raises:
        UserError: there are too few or too many clients for `simulation.names`, a class gets none, or a client no class.
    """
    names: list[str] = experiment.simulation.names or data_info["clients"]
    if len(names) != len(data_info["clients"]):
        raise UserError(
            f"simulation.names holds {len(names)} names, but the data has {len(data_info['clients'])} sites; "
            "expected a name for each"
        )
    faulty = faults.assign(experiment.simulation.faults, names, experiment.seed)
    shares = {str(name): share for name, share in experiment.federation.runtimes.items()}
    runtimes = deal_out(shares, len(names), experiment.seed, "runtimes")
    clients = tuple(
        SimulatedClient(name, index, data_info["examples"][index], runtimes[index], faulty.get(name))
        for index, name in enumerate(names)
    )
    return _with_classes(experiment, clients, {each.name: each for each in classes}) if classes else clients


def _with_classes(
    experiment: Experiment, clients: Sequence[SimulatedClient], classes: Mapping[str, DeviceClass]
) -> tuple[SimulatedClient, ...]:
    """The clients with their device classes."""
    if experiment.strategy.options["memory_mib"]:
        by, remedy = "memory_mib", "lower what the class needs, or leave it out"
        chosen = _classes_by_memory(experiment, clients)
    else:
        by, remedy = "shares", "take more clients, larger shares, or fewer classes"
        shares = {name: each.share for name, each in classes.items()}
        chosen = deal_out(shares, len(clients), experiment.seed, "device classes")
    if missing := [name for name in classes if name not in chosen]:
        raise UserError(
            f"strategy.{by} gives none of the {len(clients)} clients to {', '.join(missing)} of strategy.classes; {remedy}"
        )
    return tuple(
        replace(client, device_class=classes[name]) for client, name in zip(clients, chosen, strict=True)
    )


def _classes_by_memory(experiment: Experiment, clients: Sequence[SimulatedClient]) -> list[str]:
    """The name of the widest class that each client has the memory for."""
    path = Path(experiment.simulation.profiles or "")
    columns = read_profiles(path, experiment, clients)
    if "memory_mib" not in columns:
        raise UserError(
            f"{path}: has no column memory_mib, from which strategy.memory_mib decides the classes of clients"
        )
    least = experiment.strategy.options["memory_mib"]
    chosen = []
    for client, memory in zip(clients, columns["memory_mib"].tolist(), strict=True):
        name = device_classes.class_of(memory, device_classes.names_of(experiment), least)
        if name is None:
            raise UserError(
                f"{path}: client {client.name!r} has memory_mib = {memory:g}, and every class of strategy.memory_mib needs more, "
                f"{min(least.values()):g} or above"
            )
        chosen.append(name)
    return chosen


def deal_out(shares: Mapping[str, float], count: int, seed: int, purpose: str) -> list[str]:
    """One of the names for each of `count` clients: numbers by largest remainder, in an order drawn by `seed` and `purpose`."""
    total = sum(shares.values())
    exact = {name: share / total * count for name, share in sorted(shares.items())}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: count - sum(counts.values())]:
        counts[name] += 1
    names = [name for name in counts for _ in range(counts[name])]
    return [names[index] for index in generator(seed, purpose).permutation(count)]
