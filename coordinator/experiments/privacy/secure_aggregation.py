"""Secure aggregation in `[privacy]`: its defaults, and what does not go with a coordinator that sees only sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coordinator.experiments.privacy.section import Privacy
from coordinator.scheduling.deployments import SecureSums
from strategies.client_rules import FullBatch, PlainSGD, Proximal
from strategies.privacy.noise.distributed import GroupNoise
from strategies.relays import GroupedRule
from strategies.robust import RobustAggregator
from strategies.secagg.graph import split_into_groups
from strategies.secagg.threshold import FEWEST_CLIENTS, LEAST_THRESHOLD
from strategies.strategy import Strategy, WeightedMean

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, FleetKind

GROUP_SIZE = 16
THRESHOLD = 0.67
VALUE_BITS = 16

_KEYS = {"group_size": GROUP_SIZE, "threshold": THRESHOLD, "value_bits": VALUE_BITS}
_ON = "privacy.secure_aggregation = true"


def complete(table: Privacy) -> Privacy:
    """The table with the defaults of secure aggregation, if it is on."""
    if not table.secure_aggregation:
        return table
    return table.model_copy(
        update={key: value for key, value in _KEYS.items() if getattr(table, key) is None}
    )


def make_sums(table: Privacy, seed: int, noise: GroupNoise | None = None) -> SecureSums | None:
    """How the clients of a run add up their updates; None: they send them to the coordinator.

    `table`: resolved. `noise`: that they add inside the sums.
    """
    if not table.secure_aggregation:
        return None
    assert table.clip_norm is not None and table.group_size is not None  # resolved
    assert table.threshold is not None and table.value_bits is not None
    return SecureSums(seed, table.clip_norm, table.group_size, table.threshold, table.value_bits, noise)


def describe(table: Privacy, cohort: int, strategy: Strategy) -> dict[str, Any]:
    """What a report says of secure aggregation in rounds of so many clients; nothing where it is off."""
    if not table.secure_aggregation:
        return {}
    assert table.group_size is not None and table.threshold is not None  # resolved
    sizes = sorted({*split_into_groups(cohort, table.group_size)})
    words = (
        f"the coordinator learns the sum of each group of {' or '.join(map(str, sizes))} clients, less those that drop out, and no single "
        "update, as long as fewer than a third of a client's neighbours collude with it; a sum may still tell something of single clients, "
        "and updates are not checked"
    )
    if isinstance(strategy.aggregator, GroupedRule):
        malicious = strategy.aggregator.rule.malicious
        words += (
            f"; {strategy.name} bears malicious clients in {malicious} of a round's {len(split_into_groups(cohort, table.group_size))} groups: each "
            "can make the mean of its group what it likes, since nobody sees whether it clips its update, and it is not found out which one it is"
        )
    return {"group_sizes": sizes, "threshold": table.threshold, "in_words": words}


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of its keys, and of what it does not go with."""
    table = experiment.privacy
    if not table.secure_aggregation:
        for key in _KEYS:
            if (value := getattr(table, key)) is not None:
                yield f"privacy.{key} = {value!r} is about secure aggregation; set {_ON}, or leave it out"
        return
    yield from _key_problems(table)
    yield from _federation_problems(experiment)
    yield from _simulation_problems(experiment)
    if experiment.uplink.code is not None:
        yield (
            f"{_ON} does not go with uplink.code = {experiment.uplink.code!r}: masked updates are added value by value, and what a code "
            "writes cannot be added; leave one of them out"
        )


def strategy_problems(experiment: Experiment, strategy: Strategy | None) -> Iterator[str]:
    """A sentence if the strategy needs more than sums. `strategy`: None: it is the user's own, which gets every update."""
    if not experiment.privacy.secure_aggregation:
        return
    why = "a strategy of your own gets every update; take fedavg, or leave it out"
    if strategy is None or (why := _why_not(strategy) or ""):
        yield f"{_ON} does not go with strategy.name = {experiment.strategy.name!r}: {why}"
    elif (cohort := experiment.federation.clients_per_round) is not None:
        yield from size_problems(experiment, with_groups(strategy, experiment.privacy), cohort)


def with_groups(strategy: Strategy, table: Privacy) -> Strategy:
    """The strategy as secure aggregation needs it: a robust rule gets the means of groups. `table`: resolved."""
    if not table.secure_aggregation or not isinstance(strategy.aggregator, RobustAggregator):
        return strategy
    return replace(strategy, aggregator=GroupedRule(strategy.aggregator, FEWEST_CLIENTS))


def size_problems(experiment: Experiment, strategy: Strategy, cohort: int) -> Iterator[str]:
    """A sentence if rounds of so many clients have too few groups for a robust rule. `strategy`: with groups."""
    if not isinstance(strategy.aggregator, GroupedRule):
        return
    rule, size = strategy.aggregator.rule, experiment.privacy.group_size or GROUP_SIZE
    groups = len(split_into_groups(cohort, size))
    if groups < (needed := rule.fewest_updates):
        yield (
            f"strategy.name = {experiment.strategy.name!r} with strategy.malicious = {rule.malicious} needs {needed} or more groups of secure "
            f"aggregation in a round, since it compares their means, but privacy.group_size = {size} makes {groups} of "
            f"federation.clients_per_round = {cohort}; take smaller groups or more clients"
        )


def _key_problems(table: Privacy) -> Iterator[str]:
    if table.clip_norm is None:
        yield (
            f"privacy.clip_norm is missing: with {_ON} updates are added as numbers of a bounded range; give the largest L2 norm of an "
            "update, such as privacy.clip_norm = 1.0, to which clients scale down longer ones"
        )
    if table.threshold is not None and table.threshold < LEAST_THRESHOLD:
        yield (
            f"privacy.threshold = {table.threshold:g} is less than two thirds, below which the coordinator could unmask a client; take 0.67"
        )
    if table.mechanism not in (None, "distributed"):
        yield (
            f"{_ON} does not go with privacy.mechanism = {table.mechanism!r}, which adds its noise elsewhere; take "
            'privacy.mechanism = "distributed", or leave one of them out'
        )


def _federation_problems(experiment: Experiment) -> Iterator[str]:
    federation = experiment.federation
    cohort = federation.clients_per_round
    if cohort is not None and cohort < FEWEST_CLIENTS:
        yield (
            f"federation.clients_per_round = {cohort} is too few for {_ON}: the sum of so few tells the updates; expected "
            f"{FEWEST_CLIENTS} or more"
        )
    if federation.mode == "async":
        yield (
            f'{_ON} does not go with federation.mode = "async": the clients of a sum have to start from one model and stay until it is '
            "known; leave one of them out"
        )
    if federation.relays:
        yield (
            f"{_ON} does not go with federation.relays = {federation.relays}: relays add plain updates; leave one of them out"
        )
    if federation.outlier_factor:
        yield (
            f"federation.outlier_factor = {federation.outlier_factor:g} compares the norms of single updates, which with {_ON} nobody "
            "sees; leave it out"
        )


def _simulation_problems(experiment: Experiment) -> Iterator[str]:
    simulation = experiment.simulation
    if simulation.faults:
        yield (
            f"simulation.faults = {dict(simulation.faults)} are found by a look at single updates, which with {_ON} nobody takes; leave "
            "them out, or take simulation.dropout"
        )
    if simulation.replay is not None:
        yield f"simulation.replay repeats what was decided on plain updates, and does not go with {_ON}; leave one of them out"
    attack = simulation.attack
    if attack is not None and (attack.name not in ("label_flip", "backdoor") or attack.scale is not None):
        yield (
            f"simulation.attack.name = {attack.name!r} changes plain updates after training, and with {_ON} clients are clipped "
            "as honest ones; take label_flip, or a backdoor without a scale"
        )


def _why_not(strategy: Strategy) -> str | None:
    """Why the strategy needs more than sums; None: it does not."""
    if not isinstance(strategy.aggregator, WeightedMean | RobustAggregator):
        return "it makes its model of single updates, and the coordinator sees only sums; take fedavg, fedprox or another mean"
    if strategy.transforms:
        return "the coordinator would have to clip single updates; leave strategy.clip_norm out, privacy.clip_norm clips on the client"
    if not isinstance(strategy.client_rule, PlainSGD | Proximal | FullBatch):
        return "its clients send or keep more than an update, which secure aggregation does not add; take fedavg or fedprox"
    return None
