"""The keys of DP-FTRL in `[privacy]`: what they do not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, FleetKind

KEYS = ("noise", "minimum_separation", "bands")


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of these keys."""
    table = experiment.privacy
    if table.mechanism != "ftrl":
        for key in KEYS:
            if (value := getattr(table, key)) is not None:
                yield (
                    f'privacy.{key} = {value!r} is for privacy.mechanism = "ftrl", but it is {table.mechanism!r}; leave it out'
                )
        return
    if table.sampling != "none":
        yield (
            f'privacy.sampling = {table.sampling!r} does not go with privacy.mechanism = "ftrl": its clients are not drawn by chance in each '
            "round, but keep privacy.minimum_separation; leave it out"
        )
    if table.clipping == "adaptive":
        yield (
            'privacy.clipping = "adaptive" does not go with privacy.mechanism = "ftrl": the noise of a round takes back noise of earlier ones, '
            'so all rounds need the same clip_norm; take "fixed"'
        )
    yield from _separation_problems(experiment, fleet)


def _separation_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    table, federation = experiment.privacy, experiment.federation
    separation, bands = table.minimum_separation, table.bands
    if separation is None:
        yield (
            "privacy.minimum_separation is missing: how often a client takes part decides how much noise hides it; give the rounds from one "
            "participation of a client to the next, at most federation.clients / federation.clients_per_round"
        )
        return
    if table.noise == "tree" and bands is not None:
        yield f'privacy.bands = {bands} is for privacy.noise = "banded", but it is "tree"; leave it out'
    elif bands is not None and bands > separation:
        yield (
            f"privacy.bands = {bands} is more than privacy.minimum_separation = {separation}: the noise of a client's rounds would be "
            f"correlated, and its sensitivity is not known; take at most {separation}"
        )
    clients, cohort = federation.clients, federation.clients_per_round
    if fleet == "devices":
        return  # nobody knows how many there will be; rounds take those that may take part again
    if clients is not None and cohort is not None and (problem := too_few(clients, cohort, separation)):
        yield problem


def too_few(clients: int, cohort: int, separation: int) -> str | None:
    """Why so many clients do not suffice for the separation, or None."""
    if clients >= cohort * separation:
        return None
    return (
        f"privacy.minimum_separation = {separation} needs {cohort * separation} clients, {cohort} (federation.clients_per_round) for each "
        f"round before a client's turn comes again, but there are {clients}; take at most {clients // cohort}, or fewer clients a round"
    )
