"""What the keys of `[privacy]` do not go with: each other, the strategy, and the rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coordinator.experiments.privacy import by_clients, correlated, secure_aggregation
from coordinator.experiments.privacy.section import BY_CLIENTS, Privacy
from strategies import presets
from strategies.client_rules import FullBatch, PlainSGD, Proximal
from strategies.codes import known
from strategies.robust import RobustAggregator
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
    yield from _key_problems(table)
    yield from correlated.find_problems(experiment, fleet)
    if table.mechanism in BY_CLIENTS:
        yield from by_clients.find_problems(experiment)
    elif fleet == "devices":
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
    federation, simulation = experiment.federation, experiment.simulation
    sampling, mechanism = experiment.privacy.sampling, experiment.privacy.mechanism
    for key, value, why in (
        *(() if mechanism in BY_CLIENTS else _hidden_cohort(experiment)),
        (
            "federation.mode",
            federation.mode == "async" and "async",
            "no accountant knows how clients come in, and a stale update counts for less than the noise of a sum assumes",
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
    ):
        if value:
            yield f"{key} = {value!r} does not go with privacy.mechanism = {mechanism!r}: {why}; leave it out"
    if sampling == "fixed":
        for key in ("availability", "profiles"):
            if (value := getattr(simulation, key)) is not None:
                yield (
                    f'simulation.{key} = {value!r} does not go with privacy.sampling = "fixed": of fewer clients that are there each would '
                    'be drawn more often; take "poisson" or "none"'
                )


def _hidden_cohort(experiment: Experiment) -> Iterator[tuple[str, object, str]]:
    """Keys, values and reasons of what would tell who took part, where a coordinator adds the noise, or let one client count for more."""
    federation, simulation = experiment.federation, experiment.simulation
    yield from (
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
            "simulation.attack.name",
            simulation.attack is not None
            and simulation.attack.name in ("alie", "ipm")
            and simulation.attack.name,
            "malicious clients would send what they know of the updates of others, so that a client counts more than once",
        ),
    )


def _strategy_problems(experiment: Experiment) -> Iterator[str]:
    """One sentence for each way in which the strategy learns from clients by more than a sum of their updates."""
    name, options = experiment.strategy.name, experiment.strategy.options
    mechanism = experiment.privacy.mechanism
    by_clients = mechanism in BY_CLIENTS
    key = f"strategy.name = {name!r} does not go with privacy.mechanism = {experiment.privacy.mechanism!r}"
    if name not in presets.OPTIONS:
        why = (
            "may ask clients for more than noised updates"
            if by_clients
            else "gets every update, without noise"
        )
        yield f"{key}: a strategy of your own {why}; take fedavg or fedadam"
        return
    try:
        strategy = presets.get(name, **options)
    except presets.OptionError:
        return  # reported elsewhere
    if mechanism == "example":
        # What is done with updates of noised steps costs nothing.
        if not isinstance(strategy.client_rule, PlainSGD | Proximal):
            yield f"{key}: its clients do more with their rows than take steps, without noise; take fedavg, fedprox or a robust one"
        return
    if (reason := _why_not(strategy, by_clients)) is not None:
        yield f"{key}: {reason}; take one that averages updates, such as fedavg, fedprox or fedadam"
        return
    if options.get("weighting", "uniform") != "uniform":
        why = (
            "would be told without noise" if by_clients else "would scale its update beyond the clipping norm"
        )
        yield (
            f"strategy.weighting = {options['weighting']!r} does not go with privacy.mechanism = {experiment.privacy.mechanism!r}: a client's "
            f'number of examples {why}; take "uniform"'
        )
    if options.get("clip_norm"):
        yield f"strategy.clip_norm = {options['clip_norm']:g} and privacy.clip_norm both clip updates; leave the first one out"
    code = experiment.uplink.code
    if code is not None and experiment.privacy.mechanism == "local":
        yield (
            f'uplink.code = {code!r} does not go with privacy.mechanism = "local": a client would have to write its update after it adds the '
            "noise, which takes more bits than a code has; leave it out"
        )
    elif code is not None and known.get(code).error_feedback:
        yield (
            f"uplink.code = {code!r} does not go with privacy.mechanism = {experiment.privacy.mechanism!r}: the client counts as sent what "
            "privacy.clip_norm cuts off; take qsgd, drive or eden"
        )


def _why_not(strategy: Strategy, by_clients: bool) -> str | None:
    if not isinstance(strategy.client_rule, PlainSGD | Proximal | FullBatch):
        return "its clients keep or send more than an update, which is not clipped"
    if by_clients and isinstance(strategy.aggregator, RobustAggregator):
        return None  # what is done with noised updates costs nothing
    if by_clients and type(strategy.aggregator) is not WeightedMean:
        return "it counts updates by what clients tell of their training, for which there is no noise"
    if type(strategy.aggregator) is not WeightedMean:
        return "it compares or scales single updates, and noise on a sum does not hide what it chooses"
    if not isinstance(strategy.server_optimizer, SGD | Adaptive):
        return "its server counts how many clients took part"
    return None
