"""A fleet whose clients add up their updates by secure aggregation (`strategies.secagg`).

    1. another fleet trains the clients, and says who answers
    2. each client clips its update and encodes it in the ring
    3. the cohort is split into groups, in a new order in each round; each plays the protocol
    4. the groups' sums are added; the engine gets this sum, and of each client no more than that it took part. For a robust strategy it gets
       the mean of each group instead

A client that does not answer leaves its group: one that is too late before it sends its input, any other at a stage that the seed draws. If
too few of a group stay, its clients count as silent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
import numpy.typing as npt

from coordinator.fleets.secure.group import GroupSum, Member, Stage, device_key, sum_group
from coordinator.fleets.simulated_clients import TOO_LATE
from coordinator.rounds.fleet import (
    Answer,
    BlockSum,
    Fleet,
    Measured,
    Model,
    Result,
    Silence,
    Terms,
    WrappedFleet,
    singly,
)
from coordinator.rounds.plan import Task, generator
from edge_client.wire.arrays import DELTA
from strategies.secagg.errors import BelowThreshold
from strategies.secagg.graph import log_degree, split_into_groups
from strategies.secagg.ring import FixedPoint, Residues
from strategies.secagg.terms import FEWEST_CLIENTS
from strategies.secagg.terms import Terms as GroupTerms
from strategies.strategy import BLOCK, ClipNorm, Weighting
from strategies.summation import clamp
from strategies.summation_tree import PartialSum
from strategies.update import GroupMean, Update

MOST_LOSS = 100.0
"""Training losses are added up beside the updates, as values of this largest magnitude; larger ones count as this one."""

ALL_NEIGHBOURS = 64
"""In groups of so many clients at most all are neighbours."""

UNKNOWN_NORM = 0.0
"""Stands for the norm of an update that nobody has seen."""


@dataclass(frozen=True)
class SecureSums:
    """How a run adds up updates. `clip_norm`: largest L2 norm of an update."""

    seed: int
    clip_norm: float
    group_size: int
    threshold: float
    value_bits: int


@dataclass(frozen=True)
class _Group:
    """Positions that are added up together, and how their clients encode."""

    number: int
    positions: Sequence[int]
    point: FixedPoint


@dataclass(frozen=True)
class _Round:
    tasks: Sequence[Task]
    terms: Terms
    weighting: Weighting
    groups: Sequence[_Group]

    @property
    def number(self) -> int:
        return self.tasks[0].message.round


@dataclass
class _Gathered:
    """What has become of the cohort.

    Attributes:
        answers, vectors: of the clients that answered, by position.
        gone: positions of clients that dropped out or left; the others without a vector are too late.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    vectors: dict[int, Residues] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


class SecureFleet(WrappedFleet):
    """Another fleet, whose answers this one keeps until all are there: a vector of residues for each."""

    def __init__(self, fleet: Fleet, sums: SecureSums) -> None:
        super().__init__(fleet)
        self._sums = sums
        self._round: _Round | None = None

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        most = 1
        # Without a summation a robust rule gets the groups' means, which no client's number of examples may move.
        weighting: Weighting = "uniform" if terms.summation is None else terms.summation.weighting
        if weighting == "examples":
            declared = self._fleet.declared_examples([task.message.client for task in tasks])
            most = max(declared.values(), default=1)
            most = most if terms.expected.weight_limit is None else min(most, terms.expected.weight_limit)
        number = tasks[0].message.round if tasks else 0
        self._round = _Round(tasks, terms, weighting, self._groups(len(tasks), number, most))
        # Each update is needed: its client encodes it here.
        self._fleet.submit(tasks, model, replace(terms, summation=None))

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        assert self._round is not None and not excluded  # submitted; no update is compared with others
        played, gathered = self._round, _Gathered()
        yield from self._gather(played, gathered)
        total: npt.NDArray[np.int64] | None = None
        included = 0
        for group in played.groups:
            answers = [gathered.answers.pop(each) for each in group.positions if each in gathered.answers]
            found = self._sum(played, group, gathered)
            if isinstance(found, str):
                for answer in answers:
                    yield Silence(answer.task, f"its group has no sum: {found}", answer.seconds)
                continue
            for answer in answers:
                yield replace(answer, payload_bytes=found.bytes_up[str(answer.task.position)])
            numbers = group.point.ring.to_signed(found.residues)
            if played.terms.summation is None:
                yield _group_mean(played, group, numbers, answers)
                continue
            total = numbers if total is None else total + numbers
            included += len(found.included)
        if total is not None:
            # The groups differ in their rings, not in what a level means.
            partial = _partial_sum(played, played.groups[0].point, total, included)
            yield BlockSum(0, partial, (len(played.tasks) - 1) // BLOCK)

    def _groups(self, clients: int, number: int, most_weight: int) -> list[_Group]:
        """The groups of round `number`."""
        sums = self._sums
        order = generator(sums.seed, "groups of secure aggregation", number).permutation(clients).tolist()
        sizes = split_into_groups(clients, sums.group_size)
        ends = np.cumsum(sizes).tolist()
        return [
            _Group(
                at,
                sorted(order[end - size : end]),
                FixedPoint(max(size, 1), sums.clip_norm, sums.value_bits, most_weight),
            )
            for at, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]

    def _gather(self, played: _Round, gathered: _Gathered) -> Iterator[Result]:
        """Encodes updates as they arrive; yields everything else."""
        points = {position: group.point for group in played.groups for position in group.positions}
        for result in singly(self._fleet.results()):
            if isinstance(result, Answer) and isinstance(result.verdict, Update):
                position = result.task.position
                update = clamp(result.verdict, played.terms.expected.weight_limit)
                gathered.vectors[position] = self._encode(played, position, update, points[position])
                # The coordinator does not learn its norm.
                measured = Measured(result.verdict.num_examples, result.verdict.num_steps, UNKNOWN_NORM, {})
                gathered.answers[position] = replace(result, verdict=measured)
                continue
            if isinstance(result, Silence) and result.reason != TOO_LATE:
                gathered.gone.add(result.task.position)
            yield result

    def _encode(self, played: _Round, position: int, update: Update, point: FixedPoint) -> Residues:
        """What a client adds to the sum: its clipped update, its training loss, and its weight."""
        clip_norm = self._sums.clip_norm
        clipped, _ = ClipNorm(clip_norm).apply(update, {})
        parts = [np.asarray(clipped.delta[name]).reshape(-1) for name in sorted(clipped.delta)]
        loss = min(max(update.train_loss, -MOST_LOSS), MOST_LOSS) * (clip_norm / MOST_LOSS)
        values = np.concatenate([*parts, [loss]]).astype(np.float64)
        # Rounding to float32 may leave a value a little above the norm.
        np.clip(values, -clip_norm, clip_norm, out=values)
        weight = update.num_examples if played.weighting == "examples" else 1
        rng = generator(self._sums.seed, "rounding of secure aggregation", played.number, position)
        return point.encode(values, weight, rng)

    def _sum(self, played: _Round, group: _Group, gathered: _Gathered) -> GroupSum | str:
        """The sum of a group, or why there is none."""
        clients, seed, number = len(group.positions), self._sums.seed, played.number
        if clients < FEWEST_CLIENTS:
            return f"{clients} clients, expected {FEWEST_CLIENTS} or more"
        drawn = generator(seed, "dropouts of secure aggregation", number, group.number)
        stages = [get_args(Stage)[each] for each in drawn.integers(len(get_args(Stage)), size=clients)]
        members = [
            Member(
                str(position),
                device_key(seed, played.tasks[position].message.client),
                generator(seed, "keys of secure aggregation", number, position).bytes,
                vector := gathered.vectors.get(position),
                None if vector is not None else stage if position in gathered.gone else "input",
            )
            for position, stage in zip(group.positions, stages, strict=True)
        ]
        try:
            return sum_group(self._group_terms(played, group), members)
        except BelowThreshold as error:
            return str(error)

    def _group_terms(self, played: _Round, group: _Group) -> GroupTerms:
        clients, threshold = len(group.positions), self._sums.threshold
        values = sum(math.prod(shape) for shape in played.terms.expected.shapes.values())
        return GroupTerms(
            run=f"simulation {self._sums.seed}",
            round=played.number,
            model_sha256=played.tasks[0].message.base,
            group=group.number,
            clients=clients,
            length=group.point.length(values + 1),  # with the training loss
            ring_bits=group.point.ring.bits,
            degree=clients - 1 if clients <= ALL_NEIGHBOURS else log_degree(clients, threshold),
            threshold=threshold,
        )


def _group_mean(
    played: _Round, group: _Group, numbers: npt.NDArray[np.int64], answers: Sequence[Answer]
) -> GroupMean:
    """The mean of a group, without weights."""
    found = _partial_sum(played, group.point, numbers, len(answers))
    loss = found.loss_sum / found.num_updates
    updates = {
        each.task.position: Update({}, each.verdict.num_examples, each.verdict.num_steps, loss)
        for each in answers
        if isinstance(each.verdict, Measured)
    }
    delta = {name: value / found.num_updates for name, value in found.delta.items()}
    return GroupMean(group.number, updates, delta)


def _partial_sum(
    played: _Round, point: FixedPoint, numbers: npt.NDArray[np.int64], clients: int
) -> PartialSum:
    """The sum as the engine adds it up. `num_examples` is the sum of the weights: without weights each client counts as one."""
    values, weight = point.decode_numbers(numbers)
    delta: dict[str, npt.NDArray[np.float64]] = {}
    at = 0
    for name, shape in sorted(played.terms.expected.shapes.items()):
        size = math.prod(shape)
        delta[name.removeprefix(f"{DELTA}/")] = values[at : at + size].reshape(shape)
        at += size
    loss_sum = float(values[at]) * (MOST_LOSS / point.bound)
    return PartialSum(delta, {}, float(weight), clients, weight, loss_sum)
