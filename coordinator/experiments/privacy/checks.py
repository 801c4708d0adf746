"""The defaults of `[privacy]`, and what its keys do not go with: each other, the strategy, and the rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from coordinator.experiments.privacy import secure_aggregation
from coordinator.experiments.privacy.section import Mechanism, Privacy

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, FleetKind

DELTA = 1e-5
CLIP_QUANTILE = 0.5
"""Andrew 2021, section 4: the median works for every task that they tried."""
CLIP_LEARNING_RATE = 0.2

_ADAPTIVE = ("clip_quantile", "clip_learning_rate")
_DIFFERENTIAL = (
    "clip_norm",
    "clipping",
    *_ADAPTIVE,
    "noise_multiplier",
    "epsilon",
    "delta",
    "accountant",
    "sampling",
    "budget",
)
"""Keys that are about differential privacy."""

_NOT_BUILT: dict[Mechanism, str] = {
    "central": "no run adds the noise yet",
    "local": "no client adds noise yet",
    "distributed": "no client adds noise inside secure aggregation yet",
    "ftrl": "no run adds correlated noise yet",
    "example": "no client trains with DP-SGD yet",
}
"""Mechanisms that the file names and this version does not have, and why not."""


def complete(table: Privacy, fleet: FleetKind) -> Privacy:
    """The table with the defaults of its mechanism, and of secure aggregation."""
    table = secure_aggregation.complete(table)
    if table.mechanism is None:
        return table
    sampling = table.sampling or ("poisson" if fleet == "simulated" else "none")
    defaults: dict[str, Any] = {
        "clipping": "fixed",
        "delta": DELTA,
        "sampling": sampling,
        "accountant": "rdp" if sampling == "fixed" else "pld",
        "budget": table.epsilon,
    }
    if table.clipping == "adaptive":
        defaults |= {"clip_quantile": CLIP_QUANTILE, "clip_learning_rate": CLIP_LEARNING_RATE}
    missing = {key: value for key, value in defaults.items() if getattr(table, key) is None}
    return table.model_copy(update=missing)


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of the table, and of what it does not go with."""
    table = experiment.privacy
    yield from secure_aggregation.find_problems(experiment, fleet)
    if table.mechanism is None:
        for key in _DIFFERENTIAL:
            if key == "clip_norm" and table.secure_aggregation:
                continue
            if (value := getattr(table, key)) is not None:
                yield (
                    f"privacy.{key} = {value!r} is about differential privacy; set privacy.mechanism too, such as "
                    'privacy.mechanism = "central", or leave it out'
                )
        return
    if table.mechanism in _NOT_BUILT:
        yield (
            f"privacy.mechanism = {table.mechanism!r} is not available in this version: {_NOT_BUILT[table.mechanism]}; "
            "leave the table [privacy] out"
        )
        return
    yield from _key_problems(table)


def _key_problems(table: Privacy) -> Iterator[str]:
    if table.clip_norm is None:
        yield (
            "privacy.clip_norm is missing: without a bound on what a client sends no noise hides it; give the largest L2 norm of "
            "an update, such as privacy.clip_norm = 0.5"
        )
    if table.noise_multiplier is None and table.epsilon is None:
        yield "privacy.noise_multiplier and privacy.epsilon are both missing; give the noise, or the epsilon that it is computed from"
    if table.noise_multiplier is not None and table.epsilon is not None:
        yield (
            f"privacy.noise_multiplier = {table.noise_multiplier:g} and privacy.epsilon = {table.epsilon:g} are both set; keep one of them"
        )
    if table.clipping != "adaptive":
        for key in _ADAPTIVE:
            if (value := getattr(table, key)) is not None:
                yield f'privacy.{key} = {value:g} is for privacy.clipping = "adaptive", but it is {table.clipping!r}; leave it out'
    if table.accountant == "pld" and table.sampling == "fixed":
        yield (
            'privacy.accountant = "pld" does not go with privacy.sampling = "fixed": the privacy loss distribution of sampling without '
            'replacement is not known; take "rdp"'
        )
    if table.budget is not None and table.epsilon is not None and table.budget < table.epsilon:
        yield (
            f"privacy.budget = {table.budget:g} is less than privacy.epsilon = {table.epsilon:g}, which all rounds together spend; "
            "the run would end before its last round"
        )
