"""Relays: each folds a part of a round's cohort, and the results of all of them are folded once more.

Of a mean a relay passes on sums. The parts are ranges of the cohort's order, and any range consists of whole nodes of the tree in
which the cohort is summed (`strategies.summation_tree`): one sum if the range is a node itself, else at most two of each level. They are
float64 and are added where they would have been added without a relay, so the mean has the same bits.

Of a robust rule a relay passes on the rule's result for its part, and the rule is applied to the results. If it bears f malicious updates
of a part and g malicious results, it bears any (f + 1)(g + 1) - 1 malicious clients: a wrong result takes f + 1 of them, a wrong model g + 1
wrong results. A malicious relay is one wrong result.

Where nobody knows single updates, a robust rule is applied to the means of groups of clients. One malicious client can make the mean of its
group what it likes, so a rule that bears f malicious means bears f malicious clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from strategies.algorithms.fednova import NormalizedMean
from strategies.algorithms.qfedavg import FairMean
from strategies.cohort_fold import NeedsEachUpdate, SingleUpdates, TooFewUpdates
from strategies.params import Tensors, shape_of
from strategies.robust import RobustAggregator
from strategies.strategy import Aggregator, MeanFold, Strategy, WeightedMean, Weighting, mean_of_nodes
from strategies.summation_tree import Nodes
from strategies.update import Aggregate, GroupMean, RelayPart, RelayResult, Streams, Update

DELTA = "delta"
"""Name of the delta among the tensors that a relay passes on."""


class CannotRelay(ValueError):
    """No relay can fold a part of what the strategy aggregates; the message says why."""


def add_relays(strategy: Strategy, relays: int, malicious_relays: int = 0) -> Strategy:
    """The strategy with so many relays between the clients and the server.

    `malicious_relays`: results of relays that a robust rule bears; 0 for other strategies.

    Raises:
        CannotRelay: its aggregator needs every update.
    """
    return replace(strategy, aggregator=_split(strategy, relays, malicious_relays))


def without_relays(strategy: Strategy) -> Strategy:
    """The strategy of which relays pass on sums, without them; any other as it is."""
    aggregator = strategy.aggregator
    if not isinstance(aggregator, RelayedMean):
        return strategy
    return replace(strategy, aggregator=WeightedMean(aggregator.weighting))


def parts(cohort_size: int, relays: int) -> list[tuple[int, int]]:
    """The positions [start, stop) of each relay: a cohort in equal parts, whose sizes differ by one at most."""
    bounds = [cohort_size * index // relays for index in range(relays + 1)]
    return list(pairwise(bounds))


def _split(strategy: Strategy, relays: int, malicious_relays: int) -> Aggregator:
    aggregator = strategy.aggregator
    if isinstance(aggregator, RobustAggregator):
        return RelayedRule(aggregator, replace(aggregator, malicious=malicious_relays), relays)
    if isinstance(aggregator, WeightedMean):
        return RelayedMean(aggregator.weighting, relays)
    if isinstance(aggregator, NormalizedMean | FairMean) and isinstance(aggregator.mean, WeightedMean):
        return replace(aggregator, mean=RelayedMean(aggregator.mean.weighting, relays))
    raise CannotRelay(
        f"{strategy.name} makes its aggregate of single updates, and relays do not pass them on"
    )


def require_foldable_apart(strategy: Strategy) -> None:
    """Raises: CannotRelay: a relay on another machine does not know what it would have to fold."""
    if not isinstance(strategy.aggregator, WeightedMean | RobustAggregator):
        raise CannotRelay(
            f"{strategy.name} weighs updates by figures that relays on other machines do not pass on"
        )


def fold_part(strategy: Strategy, start: int, stop: int, updates: Mapping[int, Update]) -> list[Streams]:
    """The `results` of a `RelayPart`, given the transformed updates at its positions. `strategy`: without relays."""
    require_foldable_apart(strategy)
    aggregator = strategy.aggregator
    if isinstance(aggregator, RobustAggregator):
        if len(updates) < aggregator.fewest_updates:
            return []
        return [{DELTA: aggregator.aggregate([update for _, update in sorted(updates.items())])}]
    assert isinstance(aggregator, WeightedMean)
    nodes = _fold(aggregator.weighting, start, stop, updates)
    return [{DELTA: each.delta, **each.extras} for _, each in nodes]


def members_of_results(
    strategy: Strategy, start: int, stop: int, updates: Mapping[int, Update]
) -> list[list[int]]:
    """For each of the results of `fold_part` the positions that it stands for; tensors of the updates are not read."""
    require_foldable_apart(strategy)
    aggregator = strategy.aggregator
    if isinstance(aggregator, RobustAggregator):
        return [sorted(updates)] if len(updates) >= aggregator.fewest_updates else []
    nodes = _fold("uniform", start, stop, _without_tensors(updates))
    firsts = [position for position, _ in nodes]
    bounds = pairwise([*firsts, stop])
    return [[at for at in sorted(updates) if first <= at < end] for first, end in bounds]


def _without_tensors(updates: Mapping[int, Update]) -> dict[int, Update]:
    return {position: replace(update, delta={}, extras={}) for position, update in updates.items()}


def _fold(weighting: Weighting, start: int, stop: int, updates: Mapping[int, Update]) -> Nodes:
    fold = MeanFold(weighting, stop, start)
    for position, update in sorted(updates.items()):
        fold.add(position, update)
    return fold.nodes()


@dataclass(frozen=True)
class RelayedMean(NeedsEachUpdate):
    """The mean with sums of relays; the bits are those of `WeightedMean`."""

    weighting: Weighting
    relays: int

    def start(self, cohort_size: int) -> RelayedMeanFold:
        return RelayedMeanFold(self.weighting, parts(cohort_size, self.relays))


class RelayedMeanFold(SingleUpdates):
    """One fold for each relay, and the sum of what they pass on.

    Either gets every update, or the part of each relay.
    """

    def __init__(self, weighting: Weighting, positions: Sequence[tuple[int, int]]) -> None:
        self._weighting = weighting
        self._positions = positions
        self._folds = [MeanFold(weighting, stop, start) for start, stop in positions]
        self._parts: dict[int, Nodes] = {}

    def add(self, position: int, update: Update) -> None:
        self._folds[_relay_of(position, self._positions)].add(position, update)

    def add_part(self, part: RelayPart) -> None:
        """Adds what a relay on another machine has folded."""
        nodes = _fold(self._weighting, part.start, part.stop, _without_tensors(part.updates))
        self._parts[part.start] = [
            (position, replace(figures, delta=result[DELTA], extras=_extras(result)))
            for (position, figures), result in zip(nodes, part.results, strict=True)
        ]

    def finish(self) -> Aggregate:
        parts = [nodes for _, nodes in sorted(self._parts.items())]
        passed_on = parts or [fold.nodes() for fold in self._folds]
        aggregate = mean_of_nodes([node for nodes in passed_on for node in nodes])
        return replace(aggregate, relays=tuple(_describe(nodes) for nodes in passed_on))


@dataclass(frozen=True)
class RelayedRule(NeedsEachUpdate):
    """A robust rule for the updates of each relay (`within`), and once more for the results (`across`).

    A relay with too few updates passes nothing on.
    """

    within: RobustAggregator
    across: RobustAggregator
    relays: int

    @property
    def fewest_updates(self) -> int:
        return self.within.fewest_updates * self.across.fewest_updates

    @property
    def malicious(self) -> int:
        """Malicious clients that it bears, whichever relays they are at."""
        return (self.within.malicious + 1) * (self.across.malicious + 1) - 1

    def start(self, cohort_size: int) -> RelayedRuleFold:
        return RelayedRuleFold(self, cohort_size)


class RelayedRuleFold(SingleUpdates):
    """Keeps the updates until all have arrived; or gets the part of each relay."""

    def __init__(self, rule: RelayedRule, cohort_size: int) -> None:
        self._rule = rule
        self._size = cohort_size
        self._positions = parts(cohort_size, rule.relays)
        self._received: list[dict[int, Update]] = [{} for _ in self._positions]
        self._parts: dict[int, RelayPart] = {}

    def add(self, position: int, update: Update) -> None:
        received = self._received[_relay_of(position, self._positions)]
        if position in received:
            raise ValueError(f"position {position} was already folded")
        received[position] = update

    def add_part(self, part: RelayPart) -> None:
        """Adds what a relay on another machine has folded."""
        self._parts[part.start] = part

    def finish(self) -> Aggregate:
        within, across = self._rule.within, self._rule.across
        rest = WeightedMean("uniform").start(self._size)
        results: list[Update] = []
        relays: list[RelayResult] = []
        parts = self._passed_on()
        for updates, delta in parts:
            if delta is None:
                relays.append(RelayResult(0, 0, 0))
                continue
            for position, update in updates.items():
                rest.add(position, replace(update, delta={}))
            results.append(Update(delta, 1, 1, 0.0))
            relays.append(RelayResult(len(updates), 1, 8 * _values(delta)))
        if len(results) < across.fewest_updates:
            raise TooFewUpdates(
                f"{len(results)} of {len(parts)} relays have the {within.fewest_updates} updates that the rule needs; "
                f"expected {across.fewest_updates} such relays"
            )
        return replace(rest.finish(), delta=across.aggregate(results), relays=tuple(relays))

    def _passed_on(self) -> list[tuple[Mapping[int, Update], Tensors | None]]:
        """For each relay its updates, and the rule's result for them if they suffice."""
        if self._parts:
            ordered = [part for _, part in sorted(self._parts.items())]
            return [(part.updates, part.results[0][DELTA] if part.results else None) for part in ordered]
        within = self._rule.within
        enough = [len(received) >= within.fewest_updates for received in self._received]
        return [
            (
                received,
                within.aggregate([update for _, update in sorted(received.items())]) if is_enough else None,
            )
            for received, is_enough in zip(self._received, enough, strict=True)
        ]


@dataclass(frozen=True)
class GroupedRule(NeedsEachUpdate):
    """A robust rule for the means of groups of clients, of at least `fewest_clients` each."""

    rule: RobustAggregator
    fewest_clients: int

    @property
    def fewest_updates(self) -> int:
        return self.rule.fewest_updates * self.fewest_clients

    def start(self, cohort_size: int) -> GroupedFold:
        return GroupedFold(self.rule, cohort_size)


class GroupedFold(SingleUpdates):
    """Keeps the means of the groups until all have arrived."""

    def __init__(self, rule: RobustAggregator, cohort_size: int) -> None:
        self._rule = rule
        self._size = cohort_size
        self._groups: dict[int, GroupMean] = {}

    def add(self, position: int, update: Update) -> None:
        raise TypeError("this aggregator needs the means of groups, not single updates")

    def add_group(self, group: GroupMean) -> None:
        if group.number in self._groups:
            raise ValueError(f"group {group.number} was already folded")
        self._groups[group.number] = group

    def finish(self) -> Aggregate:
        if len(self._groups) < (needed := self._rule.fewest_updates):
            raise TooFewUpdates(
                f"{len(self._groups)} groups have a mean; expected {needed} or more, of which {self._rule.malicious} may be malicious"
            )
        groups = [group for _, group in sorted(self._groups.items())]
        rest = WeightedMean("uniform").start(self._size)
        figures = {position: update for group in groups for position, update in group.updates.items()}
        for position, update in sorted(figures.items()):
            rest.add(position, update)
        means = [Update(group.delta, 1, 1, 0.0) for group in groups]
        return replace(rest.finish(), delta=self._rule.aggregate(means))


def _extras(result: Streams) -> Streams:
    return {name: tensors for name, tensors in result.items() if name != DELTA}


def _relay_of(position: int, positions: Sequence[tuple[int, int]]) -> int:
    for relay, (start, stop) in enumerate(positions):
        if start <= position < stop:
            return relay
    raise ValueError(f"position {position} is outside the cohort of {positions[-1][1]}")


def _describe(nodes: Nodes) -> RelayResult:
    """What a relay passes on. A sum of one update is the update itself, in float32."""
    tensors = [(each.num_updates, (each.delta, *each.extras.values())) for _, each in nodes]
    payload_bytes = sum(
        (4 if updates == 1 else 8) * _values(part) for updates, streams in tensors for part in streams
    )
    return RelayResult(sum(updates for updates, _ in tensors), len(nodes), payload_bytes)


def _values(tensors: Tensors) -> int:
    return sum(prod(shape_of(tensors, name)) for name in tensors)
