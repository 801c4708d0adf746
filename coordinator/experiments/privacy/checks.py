"""What the keys of `[privacy]` do not go with: each other, the strategy, and the rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coordinator.experiments.privacy import correlated, secure_aggregation
from coordinator.experiments.privacy.section import Mechanism, Privacy
from strategies import presets
from strategies.client_rules import FullBatch, PlainSGD, Proximal
from strategies.codes import known
from strategies.strategy import SGD, Adaptive, WeightedMean

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, FleetKind
    from strategies.strategy import Strategy

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
    *correlated.KEYS,
)
"""Keys that are about differential privacy."""

_NOT_BUILT: dict[Mechanism, str] = {
    "local": "no client adds noise yet",
    "distributed": "no client adds noise inside secure aggregation yet",
    "example": "no client trains with DP-SGD yet",
}
"""Mechanisms that the file names and this version does not have, and why not."""


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
    yield from correlated.find_problems(experiment, fleet)
    if fleet == "devices":
        yield from _device_problems(table)
    yield from _round_problems(experiment)
    yield from _strategy_problems(experiment)


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


def _device_problems(table: Privacy) -> Iterator[str]:
    """One sentence for what cannot be claimed of devices that come and go."""
    if table.sampling == "fixed":
        yield (
            'privacy.sampling = "fixed" cannot be claimed of devices: of fewer that are there each would be drawn more often; leave it out, '
            'take "poisson", or privacy.mechanism = "ftrl", which needs no sampling'
        )


def _round_problems(experiment: Experiment) -> Iterator[str]:
    """One sentence for each key about rounds by which one client would count for more than its clipped update."""
    federation, simulation, sampling = (
        experiment.federation,
        experiment.simulation,
        experiment.privacy.sampling,
    )
    for key, value, why in (
        (
            "federation.mode",
            federation.mode == "async" and "async",
            "a stale update counts for less than the sum's noise assumes, and no accountant knows how clients come in",
        ),
        ("federation.relays", federation.relays, "relays pass on means, not sums of a fixed number"),
        (
            "federation.over_select",
            federation.over_select != 1 and federation.over_select,
            "the clients that answer first are no random choice",
        ),
        (
            "federation.min_updates",
            federation.min_updates > 1 and federation.min_updates,
            "whether a round changes the model would tell how many took part; each round adds its noise",
        ),
        (
            "federation.outlier_factor",
            federation.outlier_factor,
            "one client would decide whether others are left out; updates are clipped anyway",
        ),
        (
            "federation.keep",
            federation.keep == "best" and "best",
            "the best round is chosen by rows of clients, without noise",
        ),
        (
            "federation.early_stop",
            federation.early_stop,
            "when the run ends would be chosen by rows of clients, without noise",
        ),
        ("simulation.replay", simulation.replay, "its cohorts are recorded, not drawn"),
        (
            "simulation.attack.name",
            simulation.attack is not None
            and simulation.attack.name in ("alie", "ipm")
            and simulation.attack.name,
            "malicious clients would send what they know of the updates of others, so that a client counts more than once",
        ),
    ):
        if value:
            yield f"{key} = {value!r} does not go with privacy.mechanism = {experiment.privacy.mechanism!r}: {why}; leave it out"
    if sampling == "fixed":
        for key in ("availability", "profiles"):
            if (value := getattr(simulation, key)) is not None:
                yield (
                    f'simulation.{key} = {value!r} does not go with privacy.sampling = "fixed": of fewer clients that are there each would '
                    'be drawn more often; take "poisson" or "none"'
                )


def _strategy_problems(experiment: Experiment) -> Iterator[str]:
    """One sentence for each way in which the strategy learns from clients by more than a sum of their updates."""
    name, options = experiment.strategy.name, experiment.strategy.options
    key = f"strategy.name = {name!r} does not go with privacy.mechanism = {experiment.privacy.mechanism!r}"
    if name not in presets.OPTIONS:
        yield f"{key}: a strategy of your own gets every update, without noise; take fedavg or fedadam"
        return
    try:
        strategy = presets.get(name, **options)
    except presets.OptionError:
        return  # reported elsewhere
    if (why := _why_not(strategy)) is not None:
        yield f"{key}: {why}; take one that averages updates, such as fedavg, fedprox or fedadam"
        return
    if options.get("weighting", "uniform") != "uniform":
        yield (
            f"strategy.weighting = {options['weighting']!r} does not go with privacy.mechanism = {experiment.privacy.mechanism!r}: a client's "
            'number of examples would scale its update beyond the clipping norm; take "uniform"'
        )
    if options.get("clip_norm"):
        yield f"strategy.clip_norm = {options['clip_norm']:g} and privacy.clip_norm both clip updates; leave the first one out"
    code = experiment.uplink.code
    if code is not None and known.get(code).error_feedback:
        yield (
            f"uplink.code = {code!r} does not go with privacy.mechanism = {experiment.privacy.mechanism!r}: the client counts as sent what "
            "privacy.clip_norm cuts off; take qsgd, drive or eden"
        )


def _why_not(strategy: Strategy) -> str | None:
    if not isinstance(strategy.client_rule, PlainSGD | Proximal | FullBatch):
        return "its clients keep or send more than an update, which is not clipped"
    if type(strategy.aggregator) is not WeightedMean:
        return "it compares or scales single updates, and noise on a sum does not hide what it chooses"
    if not isinstance(strategy.server_optimizer, SGD | Adaptive):
        return "its server counts how many clients took part"
    return None
