"""Which keys of the table `[simulation]` go together, and their values that a type does not check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from coordinator.experiments import distributions
from edge_client.data.connector import DataProblem

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, Simulation


_DRAWN = ("speed", "download", "upload", "availability")


def find_problems(experiment: Experiment) -> Iterator[str]:
    """One sentence for each problem of the table."""
    federation, simulation = experiment.federation, experiment.simulation
    names = simulation.names
    if names is not None and (len(set(names)), len(names)) != (federation.clients or len(names),) * 2:
        yield (
            f"simulation.names holds {len(names)} names, {len(set(names))} of them different; expected one for each "
            + (f"of the clients, federation.clients = {federation.clients}" if federation.clients else "site")
        )
    faulty = sum(simulation.faults.values())
    if federation.clients is not None and faulty >= federation.clients:
        yield f"simulation.faults names {faulty} faulty clients, but federation.clients = {federation.clients}; leave at least one honest"
    yield from _attack_problems(experiment)
    yield from _straggler_problems(experiment)
    yield from _drawn_problems(simulation)
    record = experiment.record
    if record is not None and (not re.fullmatch(r"[\w-][\w.-]{0,99}\.csv", record) or record == "rounds.csv"):
        yield f"record = {record!r}: expected the name of a new file in the run's folder, such as trace.csv"


def _attack_problems(experiment: Experiment) -> Iterator[str]:
    attack, simulation, clients = (
        experiment.simulation.attack,
        experiment.simulation,
        experiment.federation.clients,
    )
    if attack is None:
        return
    if clients is not None and attack.clients >= clients:
        yield (
            f"simulation.attack.clients = {attack.clients} of federation.clients = {clients} are malicious; leave at least one honest"
        )
    if attack.name != "backdoor":
        for key in ("target", "share"):
            if getattr(attack, key) is not None:
                yield f"simulation.attack.{key} is for a backdoor, but simulation.attack.name = {attack.name!r}; leave it out"
    if attack.scale is not None and attack.name == "label_flip":
        yield f"simulation.attack.scale is for attacks that change the update, but simulation.attack.name = {attack.name!r}; leave it out"
    others = {
        "federation.mode": experiment.federation.mode == "async" and "async",
        "simulation.replay": simulation.replay,
        "simulation.faults": dict(simulation.faults),
    }
    for key, value in others.items():
        if value:
            yield f"simulation.attack does not go with {key} = {value!r}; leave one of them out"


def _straggler_problems(experiment: Experiment) -> Iterator[str]:
    if experiment.simulation.stragglers is None:
        return
    for key, value in (
        ("federation.mode", experiment.federation.mode == "async" and "async"),
        ("simulation.replay", experiment.simulation.replay),
    ):
        if value:
            yield f"simulation.stragglers does not go with {key} = {value!r}; leave one of them out"
    local = experiment.local
    if 1 in (local.epochs, local.steps):
        yield (
            f"simulation.stragglers do a part of local.{'epochs' if local.steps is None else 'steps'} = 1, and there is none; "
            "expected 2 or more"
        )


def _drawn_problems(simulation: Simulation) -> Iterator[str]:
    if simulation.speed is not None and simulation.speed_spread:
        yield (
            f"simulation.speed = {simulation.speed!r} and simulation.speed_spread = {simulation.speed_spread:g} both say how "
            "fast clients are; keep one of them"
        )
    period = simulation.availability_period_seconds
    if period is not None and simulation.availability is None and simulation.profiles is None:
        yield (
            f"simulation.availability_period_seconds = {period:g} repeats times of presence, and there are none; give "
            "simulation.availability or simulation.profiles too, or leave it out"
        )
    for key in _DRAWN:
        text = getattr(simulation, key)
        if text is None:
            continue
        try:
            drawn = distributions.parse(text)
        except DataProblem as error:
            yield f"simulation.{key}: {error}"
            continue
        if key == "availability" and drawn.kind != "lognormal" and drawn.largest > 1:
            yield f"simulation.availability = {text!r}: a client is there for at most all of the time; expected shares up to 1"
