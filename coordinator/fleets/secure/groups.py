"""The groups of a round whose clients add up their updates by secure aggregation, and what the engine gets of a group's sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from coordinator.rounds.fleet import Answer, BlockSum, Measured, Terms
from coordinator.rounds.plan import Task, generator
from coordinator.scheduling.deployments import SecureSums
from edge_client.wire.arrays import DELTA
from edge_client.wire.secure import SecureTask
from strategies.secagg.graph import log_degree, split_into_groups
from strategies.secagg.ring import Residues
from strategies.secagg.terms import Terms as GroupTerms
from strategies.secagg.vector import UpdateVector
from strategies.strategy import BLOCK, Weighting
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
    vector: UpdateVector

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
        )
        groups.append(Group(positions, task, task.vector(shapes)))
    return groups


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
        self._group: Group | None = None
        self._numbers: npt.NDArray[np.int64] | None = None
        self._included = 0

    def add(self, group: Group, residues: Residues, answers: Sequence[Answer]) -> Iterator[GroupMean]:
        """Adds the sum of a group's vectors. `answers`: of the clients in it. For a robust rule its mean comes at once."""
        numbers = group.vector.point.ring.to_signed(residues)
        if self._terms.summation is None:
            yield group_mean(group, numbers, answers)
            return
        # The groups differ in their rings, not in what a level means.
        self._group, self._included = self._group or group, self._included + len(answers)
        self._numbers = numbers if self._numbers is None else self._numbers + numbers

    def finish(self) -> Iterator[BlockSum]:
        """The sum of the groups, if there is any."""
        if self._numbers is not None and self._group is not None:
            partial = self._group.vector.decode(self._numbers, self._included)
            yield BlockSum(0, partial, (self._clients - 1) // BLOCK)


def group_mean(group: Group, numbers: npt.NDArray[np.int64], answers: Sequence[Answer]) -> GroupMean:
    """The mean of a group, without weights."""
    found = group.vector.decode(numbers, len(answers))
    loss = found.loss_sum / found.num_updates
    updates = {
        each.task.position: Update({}, each.verdict.num_examples, each.verdict.num_steps, loss)
        for each in answers
        if isinstance(each.verdict, Measured)
    }
    delta = {name: value / found.num_updates for name, value in found.delta.items()}
    return GroupMean(group.number, updates, delta)
