"""The groups of a round whose clients add up their updates by secure aggregation, and what the engine gets of a group's sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from coordinator.rounds.fleet import Answer, BlockSum, Measured, Terms
from coordinator.rounds.plan import Task, generator
from coordinator.scheduling.deployments import SecureSums
from edge_client.wire.arrays import DELTA
from edge_client.wire.secure import NoiseShare, SecureTask
from strategies.params import elementwise
from strategies.privacy.noised_vector import NoisedVector
from strategies.secagg.graph import log_degree, split_into_groups
from strategies.secagg.ring import Residues
from strategies.secagg.terms import Terms as GroupTerms
from strategies.secagg.threshold import FEWEST_CLIENTS
from strategies.secagg.vector import UpdateVector
from strategies.strategy import BLOCK, Weighting
from strategies.summation_tree import PartialSum, plus
from strategies.update import GroupMean, Update

ALL_NEIGHBOURS = 64
"""In groups of so many clients at most all are neighbours."""

UNKNOWN_NORM = 0.0
"""Stands for the norm of an update that nobody has seen."""


@dataclass(frozen=True)
class Group:
    """Clients that are added up together.

    Attributes:
        positions: theirs in the cohort, in order.
        task: what each of them is told.
        vector: how they encode.
    """

    positions: Sequence[int]
    task: SecureTask
    vector: UpdateVector | NoisedVector

    @property
    def number(self) -> int:
        return self.task.group

    def terms(self, run: str, task: Task) -> GroupTerms:
        """The terms of its sum. `task`: that of any client of the round."""
        return self.task.terms(run, task.message.round, task.message.base, self.vector)


def split(sums: SecureSums, clients: int, number: int) -> list[list[int]]:
    """The positions of each group of round `number`, drawn anew in each round."""
    order = generator(sums.seed, "groups of secure aggregation", number).permutation(clients).tolist()
    ends = np.cumsum([0, *split_into_groups(clients, sums.group_size)]).tolist()
    return [sorted(order[start:end]) for start, end in pairwise(ends)]


def make_groups(
    sums: SecureSums, clients: int, number: int, terms: Terms, most_weight: int = 1
) -> list[Group]:
    """The groups of round `number`. `most_weight`: the largest weight of a client."""
    shapes, groups = shapes_of(terms), []
    for at, positions in enumerate(split(sums, clients, number)):
        size = len(positions)
        task = SecureTask(
            group=at,
            clients=max(size, 1),
            degree=max(2, size - 1) if size <= ALL_NEIGHBOURS else log_degree(size, sums.threshold),
            threshold=sums.threshold,
            clip_norm=sums.clip_norm,
            value_bits=sums.value_bits,
            most_weight=most_weight,
            noise=_noise(sums, number, at) if size >= FEWEST_CLIENTS else None,  # fewer have no sum
        )
        groups.append(Group(positions, task, task.vector(shapes)))
    return groups


def _noise(sums: SecureSums, number: int, group: int) -> NoiseShare | None:
    """The noise that clients of a group add in round `number`."""
    if sums.noise is None:
        return None
    seed = generator(sums.seed, "rotation of secure aggregation", number, group).integers(2**32)
    return NoiseShare(sums.noise.kind, sums.noise.noise_multiplier, int(seed))


def shapes_of(terms: Terms) -> dict[str, tuple[int, ...]]:
    """The shapes of a client's update, by tensor."""
    return {name.removeprefix(f"{DELTA}/"): shape for name, shape in terms.expected.shapes.items()}


def weighting_of(terms: Terms) -> Weighting:
    """How clients count. Without a summation a robust rule gets the groups' means, which no client's number of examples may move."""
    return "uniform" if terms.summation is None else terms.summation.weighting


def most_weight(terms: Terms, declared: Mapping[str, int]) -> int:
    """The largest weight of a client. `declared`: numbers of examples, by client."""
    if weighting_of(terms) == "uniform":
        return 1
    most, limit = max(declared.values(), default=1), terms.expected.weight_limit
    return most if limit is None else min(most, limit)


class RoundSum:
    """What the engine gets of the sums of a round's groups."""

    def __init__(self, terms: Terms, clients: int) -> None:
        self._terms, self._clients = terms, clients
        self._total: PartialSum | None = None

    def add(self, group: Group, residues: Residues, answers: Sequence[Answer]) -> Iterator[GroupMean]:
        """Adds the sum of a group's vectors. `answers`: of the clients in it. For a robust rule its mean comes at once."""
        summed = group.vector.decode(group.vector.ring.to_signed(residues), len(answers))
        if self._terms.summation is None:
            yield group_mean(group, summed, answers)
            return
        self._total = summed if self._total is None else plus(self._total, summed)

    def finish(self) -> Iterator[BlockSum]:
        """The sum of the groups, if there is any."""
        if self._total is not None:
            yield BlockSum(0, self._total, (self._clients - 1) // BLOCK)


def group_mean(group: Group, found: PartialSum, answers: Sequence[Answer]) -> GroupMean:
    """The mean of a group, without weights. `found`: its sum."""
    loss = found.loss_sum / found.num_updates
    updates = {
        each.task.position: Update({}, each.verdict.num_examples, each.verdict.num_steps, loss)
        for each in answers
        if isinstance(each.verdict, Measured)
    }
    delta = elementwise(lambda value: value / found.num_updates, found.delta)
    return GroupMean(group.number, updates, delta)
