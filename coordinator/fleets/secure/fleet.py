"""A fleet whose clients add up their updates by secure aggregation (`strategies.secagg`).

    1. another fleet trains the clients, and says who answers
    2. each client clips its update and encodes it in the ring, with its share of noise if there is to be some
    3. the cohort is split into groups, in a new order in each round; each plays the protocol
    4. the groups' sums are added; the engine gets this sum, and of each client no more than that it took part. For a robust strategy it gets
       the mean of each group instead

A client that does not answer leaves its group: one that is too late before it sends its input, any other at a stage that the seed draws. If
too few of a group stay, its clients count as silent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from coordinator.fleets.secure.group import GroupSum, Member, Stage, device_key, sum_group
from coordinator.fleets.secure.groups import (
    UNKNOWN_NORM,
    Group,
    RoundSum,
    make_groups,
    most_weight,
    weighting_of,
)
from coordinator.fleets.simulated_clients import TOO_LATE
from coordinator.rounds.fleet import (
    Answer,
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
from coordinator.scheduling.deployments import SecureSums
from strategies.privacy.noise.secure import SeededSource
from strategies.privacy.noised_vector import NoisedVector
from strategies.secagg.errors import BelowThreshold
from strategies.secagg.ring import Residues
from strategies.secagg.threshold import FEWEST_CLIENTS
from strategies.update import Update


@dataclass(frozen=True)
class _Round:
    tasks: Sequence[Task]
    terms: Terms
    groups: Sequence[Group]

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

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        if self._sums.noise is not None:
            return {}  # which no noise would hide
        return self._fleet.declared_examples(clients)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        declared = (
            self._fleet.declared_examples([task.message.client for task in tasks])
            if weighting_of(terms) == "examples"
            else {}
        )
        number = tasks[0].message.round if tasks else 0
        groups = make_groups(self._sums, len(tasks), number, terms, most_weight(terms, declared))
        self._round = _Round(tasks, terms, groups)
        # Each update is needed: its client encodes it here.
        self._fleet.submit(tasks, model, replace(terms, summation=None))

    def results(self, excluded: Collection[int] = ()) -> Iterator[Result]:
        assert self._round is not None and not excluded  # submitted; no update is compared with others
        played, gathered = self._round, _Gathered()
        yield from self._gather(played, gathered)
        total = RoundSum(played.terms, len(played.tasks))
        for group in played.groups:
            answers = [gathered.answers.pop(each) for each in group.positions if each in gathered.answers]
            found = self._sum(played, group, gathered)
            if isinstance(found, str):
                for answer in answers:
                    yield Silence(answer.task, f"its group has no sum: {found}", answer.seconds)
                continue
            for answer in answers:
                name = str(answer.task.position)
                up, down = found.bytes_up[name], found.bytes_down[name]
                yield replace(answer, payload_bytes=up, received_bytes=down)
            yield from total.add(group, found.residues, answers)
        yield from total.finish()

    def _gather(self, played: _Round, gathered: _Gathered) -> Iterator[Result]:
        """Encodes updates as they arrive; yields everything else."""
        vectors = {position: group.vector for group in played.groups for position in group.positions}
        for result in singly(self._fleet.results()):
            if isinstance(result, Answer) and isinstance(result.verdict, Update):
                position = result.task.position
                rng = generator(self._sums.seed, "rounding of secure aggregation", played.number, position)
                vector = vectors[position]
                gathered.vectors[position] = (
                    vector.encode(result.verdict, SeededSource(rng))
                    if isinstance(vector, NoisedVector)
                    else vector.encode(result.verdict, rng)
                )
                # The coordinator does not learn its norm, and where clients add noise nothing that has none.
                examples, steps = result.verdict.num_examples, result.verdict.num_steps
                told = (examples, steps) if self._sums.noise is None else (1, 1)
                measured = Measured(*told, UNKNOWN_NORM, {})
                gathered.answers[position] = replace(result, verdict=measured)
                continue
            if isinstance(result, Silence) and result.reason != TOO_LATE:
                gathered.gone.add(result.task.position)
            yield result

    def _sum(self, played: _Round, group: Group, gathered: _Gathered) -> GroupSum | str:
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
            return sum_group(group.terms(f"simulation {seed}", played.tasks[0]), members)
        except BelowThreshold as error:
            return str(error)
