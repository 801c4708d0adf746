"""The keys of DP-FTRL in `[privacy]`, and those about turns: what they do not go with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from coordinator.experiments.privacy.section import BY_CLIENTS, Mechanism, Noise

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, FleetKind

_FTRL: Final = "ftrl"

KEYS: dict[str, tuple[Mechanism, ...]] = {
    "noise": (_FTRL, "distributed"),
    "minimum_separation": (_FTRL, *BY_CLIENTS),
    "bands": (_FTRL,),
}
"""Keys that not every mechanism has, and those that have them."""

_NOISE: dict[Mechanism, tuple[Noise, ...]] = {
    _FTRL: ("banded", "tree"),
    "distributed": ("skellam", "discrete_gaussian"),
}


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of these keys."""
    table = experiment.privacy
    assert table.mechanism is not None  # else they are refused
    for key, mechanisms in KEYS.items():
        if (value := getattr(table, key)) is not None and table.mechanism not in mechanisms:
            yield (
                f"privacy.{key} = {value!r} is for privacy.mechanism = {_alternatives(mechanisms)}, but it is {table.mechanism!r}; leave it out"
            )
    kinds = _NOISE.get(table.mechanism, ())
    if kinds and table.noise is not None and table.noise not in kinds:
        yield (
            f"privacy.noise = {table.noise!r} is not for privacy.mechanism = {table.mechanism!r}; take {_alternatives(kinds)}"
        )
    if table.mechanism in BY_CLIENTS and fleet != "devices":
        yield from _turn_problems(experiment)
    if table.mechanism != _FTRL:
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
    table = experiment.privacy
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
    if fleet != "devices":
        # Of devices nobody knows how many there will be; rounds take those that may take part again.
        yield from _turn_problems(experiment)


def _turn_problems(experiment: Experiment) -> Iterator[str]:
    """A sentence if there are too few clients for their turns."""
    table, federation = experiment.privacy, experiment.federation
    problem = too_few(federation.clients, federation.clients_per_round, table.minimum_separation)
    if problem is not None:
        yield problem


def _alternatives(names: Sequence[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def too_few(clients: int | None, cohort: int | None, separation: int | None) -> str | None:
    """Why so many clients do not suffice for the separation; None: they do, or a number is not known yet."""
    if clients is None or cohort is None or separation is None or clients >= cohort * separation:
        return None
    return (
        f"privacy.minimum_separation = {separation} needs {cohort * separation} clients, {cohort} (federation.clients_per_round) for each "
        f"round before a client's turn comes again, but there are {clients}; take at most {clients // cohort}, or fewer clients a round"
    )
