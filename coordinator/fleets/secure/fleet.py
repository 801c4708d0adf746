"""A fleet whose clients add up their updates by secure aggregation (`strategies.secagg`).

    1. another fleet trains the clients, and says who answers
    2. each client clips its update and encodes it in the ring
    3. the cohort is split into groups, in a new order in each round; each plays the protocol
    4. the groups' sums are added; the engine gets this sum, and of each client no more than that it took part

A client that does not answer leaves its group: one that is too late before it sends its input, any other at a stage that the seed draws. If
too few of a group stay, its clients count as silent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    OpenRound,
    Result,
    Silence,
    Terms,
    singly,
)
from coordinator.rounds.plan import Task, generator
from edge_client.wire.arrays import DELTA
from strategies.params import Params, Tensors
from strategies.secagg.errors import BelowThreshold
from strategies.secagg.graph import log_degree, split_into_groups
from strategies.secagg.ring import FixedPoint, Residues
from strategies.secagg.terms import FEWEST_CLIENTS
from strategies.secagg.terms import Terms as GroupTerms
from strategies.strategy import BLOCK, ClipNorm, Weighting
from strategies.summation import clamp
from strategies.summation_tree import PartialSum
from strategies.update import Update

MOST_LOSS = 100.0
"""Training losses are added up beside the updates, as values of this largest magnitude; larger ones count as this one."""

ALL_NEIGHBOURS = 64
"""In groups of so many clients at most all are neighbours."""

UNKNOWN_NORM = 0.0
"""What is told of the norm of an update that nobody has seen."""


@dataclass(frozen=True)
class SecureSums:
    """How a run adds up updates. `clip_norm`: largest L2 norm of an update."""

    seed: int
    clip_norm: float
    group_size: int
    threshold: float
    value_bits: int


@dataclass(frozen=True)
class _Round:
    tasks: Sequence[Task]
    terms: Terms
    most_weight: int

    @property
    def weighting(self) -> Weighting:
        assert (
            self.terms.summation is not None
        )  # the experiment's check refuses strategies that need each update
        return self.terms.summation.weighting


class SecureFleet:
    """Implements `rounds.fleet.Fleet` by another one, whose answers it keeps until all are there: a vector of residues for each."""

    def __init__(self, fleet: Fleet, sums: SecureSums) -> None:
        self._fleet = fleet
        self._sums = sums
        self._round: _Round | None = None

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return self._fleet.find_open_round(round_number)

    def clients(self, wanted: int) -> Sequence[str]:
        return self._fleet.clients(wanted)

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return self._fleet.declared_examples(clients)

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        return self._fleet.model(params, streams)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        declared = self._fleet.declared_examples([task.message.client for task in tasks])
        most = max(declared.values(), default=1)
        limit = terms.expected.weight_limit
        self._round = _Round(tasks, terms, most if limit is None else min(most, limit))
        # Each update is needed: clients encode it here.
        self._fleet.submit(tasks, model, replace(terms, summation=None))

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        assert self._round is not None and not excluded  # submitted; no update is compared with others
        played, sums = self._round, self._sums
        answers: dict[int, Answer] = {}
        vectors: dict[int, Residues] = {}
        late: set[int] = set()
        points = self._points(played)
        for result in singly(self._fleet.results()):
            if isinstance(result, Answer) and isinstance(result.verdict, Update):
                position = result.task.position
                update = clamp(result.verdict, played.terms.expected.weight_limit)
                vectors[position] = self._encode(played, position, update, points[position][1])
                # The coordinator knows neither the update nor its figures.
                measured = Measured(result.verdict.num_examples, result.verdict.num_steps, UNKNOWN_NORM, {})
                answers[position] = replace(result, verdict=measured)
                continue
            if isinstance(result, Silence) and result.reason == TOO_LATE:
                late.add(result.task.position)
            yield result
        total: npt.NDArray[np.int64] | None = None
        point: FixedPoint | None = None
        included = 0
        for number, positions in enumerate(self._groups(played)):
            found = self._sum(played, number, positions, vectors, late)
            if isinstance(found, str):
                for position in filter(answers.__contains__, positions):
                    answer = answers.pop(position)
                    yield Silence(answer.task, f"its group has no sum: {found}", answer.seconds)
                continue
            for position in filter(answers.__contains__, positions):
                answers[position] = replace(answers[position], payload_bytes=found.bytes_up[str(position)])
            point = points[positions[0]][1]
            numbers = point.ring.to_signed(found.residues)
            total = numbers if total is None else total + numbers
            included += len(found.included)
        yield from answers.values()
        if total is not None and point is not None:
            last = (len(played.tasks) - 1) // BLOCK
            yield BlockSum(0, _partial_sum(played, point, total, included, sums.clip_norm), last)

    def simulated_seconds(self) -> float | None:
        return self._fleet.simulated_seconds()

    def cancel(self, tasks: Sequence[Task]) -> None:
        self._fleet.cancel(tasks)

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        return self._fleet.client_state(accepted)

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        self._fleet.restore(states)

    def _groups(self, played: _Round) -> list[list[int]]:
        """The positions of each group."""
        rng = generator(self._sums.seed, "groups of secure aggregation", _number(played))
        order = rng.permutation(len(played.tasks)).tolist()
        sizes = split_into_groups(len(order), self._sums.group_size)
        ends = np.cumsum(sizes).tolist()
        return [sorted(order[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def _points(self, played: _Round) -> dict[int, tuple[int, FixedPoint]]:
        """The number of the group of each position, and how its clients encode."""
        most = played.most_weight if played.weighting == "examples" else 1
        return {
            position: (
                number,
                FixedPoint(len(positions), self._sums.clip_norm, self._sums.value_bits, most),
            )
            for number, positions in enumerate(self._groups(played))
            for position in positions
        }

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
        rng = generator(self._sums.seed, "rounding of secure aggregation", _number(played), position)
        return point.encode(values, weight, rng)

    def _sum(
        self,
        played: _Round,
        number: int,
        positions: Sequence[int],
        vectors: Mapping[int, Residues],
        late: Collection[int],
    ) -> GroupSum | str:
        """The sum of a group, or why there is none."""
        clients = len(positions)
        if clients < FEWEST_CLIENTS:
            return f"{clients} clients, expected {FEWEST_CLIENTS} or more"
        seed, threshold = self._sums.seed, self._sums.threshold
        _, point = self._points(played)[positions[0]]
        shapes = played.terms.expected.shapes
        terms = GroupTerms(
            run=f"simulation {seed}",
            round=_number(played),
            model_sha256=played.tasks[0].message.base,
            group=number,
            clients=clients,
            length=point.length(1 + sum(math.prod(shape) for shape in shapes.values())),
            ring_bits=point.ring.bits,
            degree=clients - 1 if clients <= ALL_NEIGHBOURS else log_degree(clients, threshold),
            threshold=threshold,
        )
        drawn = generator(seed, "dropouts of secure aggregation", _number(played), number)
        stages: Sequence[Stage] = get_args(Stage)
        members = []
        for position in positions:
            stage = stages[int(drawn.integers(len(stages)))]
            leaves: Stage = "input" if position in late else stage
            rng = generator(seed, "keys of secure aggregation", _number(played), position)
            members.append(
                Member(
                    str(position),
                    device_key(seed, played.tasks[position].message.client),
                    rng.bytes,
                    vectors.get(position),
                    None if position in vectors else leaves,
                )
            )
        try:
            return sum_group(terms, members)
        except BelowThreshold as error:
            return str(error)


def _number(played: _Round) -> int:
    return played.tasks[0].message.round


def _partial_sum(
    played: _Round, point: FixedPoint, numbers: npt.NDArray[np.int64], clients: int, clip_norm: float
) -> PartialSum:
    """The sum as the engine adds it up. `num_examples` is the sum of the weights: without weights each client counts as one."""
    values, weight = point.decode_numbers(numbers)
    delta: dict[str, npt.NDArray[np.float64]] = {}
    at = 0
    for name, shape in sorted(played.terms.expected.shapes.items()):
        size = math.prod(shape)
        delta[name.removeprefix(f"{DELTA}/")] = values[at : at + size].reshape(shape)
        at += size
    loss_sum = float(values[at]) * (MOST_LOSS / clip_norm)
    return PartialSum(delta, {}, float(weight), clients, weight, loss_sum)
