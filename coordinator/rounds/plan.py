"""The plan of a run, fixed before it starts, and the cohort and tasks of a round.

Randomness has no state: the generator of round r is seeded by (seed, purpose, r), so a resumed run draws the same numbers
as an uninterrupted one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from coordinator.rounds.closing import Closing
from edge_client.train import seeding
from edge_client.wire.device import TaskMessage
from strategies import client_rules
from strategies.codes import known
from strategies.codes.code import Code
from strategies.local_optimizers import AdamW
from strategies.staleness import StalenessWeight
from strategies.strategy import Strategy

if TYPE_CHECKING:
    from coordinator.rounds.private_round import PrivacyPlan


@dataclass(frozen=True)
class LocalWork:
    """The local training of every client in a round; exactly one of `epochs` and `steps` is set.

    `momentum`, `clip_grad_norm`: of the steps; 0 is off. `optimizer`: None: SGD.
    """

    batch_size: int
    lr: float
    epochs: int | None
    steps: int | None
    momentum: float = 0.0
    clip_grad_norm: float = 0.0
    optimizer: AdamW | None = None

    @property
    def optimizer_options(self) -> dict[str, Any] | None:
        """The optimizer as JSON."""
        return None if self.optimizer is None else self.optimizer.to_options()


@dataclass(frozen=True)
class Asynchrony:
    """How a run works whose clients do not wait for each other (`rounds.asynchronous`).

    Attributes:
        concurrency: clients that train at a time.
        max_staleness: most versions that the base of an accepted update may be old; None: any number.
    """

    concurrency: int
    staleness: StalenessWeight
    max_staleness: int | None = None


@dataclass(frozen=True)
class Cohort:
    """The clients of a round in the canonical order of aggregation, and the number of those that could have been chosen."""

    clients: tuple[str, ...]
    population: int


@dataclass(frozen=True)
class RunPlan:
    """One federated training.

    Attributes:
        trainable: names of the tensors that clients train and send.
        closing: when a round closes.
        over_select: the cohort is this many times the updates that close a round, >= 1.
        early_stop: the run ends after so many scored rounds without a better one; 0: never.
        keep_best: its result is the model of the best round, else of the last.
        by_metric: the best round is that with the highest `Score.metric`, else that with the lowest test loss.
        min_updates: quorum at the deadline; with fewer the round changes nothing.
        max_examples: the most that one client may claim; None: no limit.
        outlier_factor: limit of an update's step length as a multiple of the others' (`rounds.aggregation`); 0: no limit.
        weight_cap: limit of an update's weight as a multiple of the cohort's median number of examples; 0: no limit.
        asynchrony: None: rounds are synchronous.
        records: whether each round emits its trace (`rounds.trace`).
        cohorts: of rounds that are replayed, by round; all others are drawn.
        code: by which clients write their updates; None: they send them as they are.
        downlink: by which the server writes what changes of the model; None: it sends the model.
        privacy: None: what rounds release is not differentially private.
        clip_norm: L2 norm that clients scale a longer update down to before they send it; 0: they do not.
        noise_options: of the noise that devices add themselves (`TaskMessage.noise`); None: none.
    """

    seed: int
    rounds: int
    strategy: Strategy
    local: LocalWork
    trainable: tuple[str, ...]
    closing: Closing
    early_stop: int = 0
    keep_best: bool = False
    by_metric: bool = False
    over_select: float = 1.0
    min_updates: int = 1
    max_examples: int | None = None
    outlier_factor: float = 0.0
    weight_cap: float = 0.0
    asynchrony: Asynchrony | None = None
    records: bool = False
    cohorts: Mapping[int, Cohort] = field(default_factory=dict)
    code: Code | None = None
    downlink: Code | None = None
    privacy: PrivacyPlan | None = None
    clip_norm: float = 0.0
    noise_options: Mapping[str, Any] | None = None

    @property
    def code_options(self) -> dict[str, Any] | None:
        """The code as JSON."""
        return None if self.code is None else known.to_options(self.code)


@dataclass(frozen=True)
class Task:
    """What one client of a cohort does in a round: its position, and the message to it."""

    position: int
    message: TaskMessage


@dataclass(frozen=True)
class Tasks(Sequence[Task]):
    """The tasks of a cohort by position, by column; a `Task` is made when one is asked for.

    Attributes:
        shared: their message, without a client and its seed.
        changed: tasks that differ in more than that, by position.
    """

    shared: TaskMessage
    clients: Sequence[str]
    seeds: Sequence[int]
    changed: Mapping[int, Task] = field(default_factory=dict)

    @staticmethod
    def of(tasks: Sequence[Task]) -> Tasks:
        """The columns of at least one task; each has its index as its position."""
        if isinstance(tasks, Tasks):
            return tasks
        messages = [task.message for task in tasks]
        clients, seeds = [each.client for each in messages], [each.seed for each in messages]
        return Tasks(messages[0], clients, seeds, dict(enumerate(tasks)))

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        at = range(len(self))[index]
        if at in self.changed:
            return self.changed[at]
        return Task(at, replace(self.shared, client=self.clients[at], seed=self.seeds[at]))


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """The generator for one purpose, such as `("cohort", round)`; independent across purposes and numbers."""
    return np.random.default_rng(entropy(seed, purpose, *numbers))


def entropy(seed: int, purpose: str, *numbers: int) -> list[int]:
    """What `generator` is seeded with, for `edge_client.train.seeding`."""
    return [seed, zlib.crc32(purpose.encode()), *numbers]


def cohort_size(plan: RunPlan) -> int:
    """Size of a cohort if there are enough clients."""
    return math.ceil(plan.closing.wanted * plan.over_select)


def choose_cohort(clients: Sequence[str], plan: RunPlan, rng: np.random.Generator) -> tuple[str, ...]:
    """Clients for one round, drawn without replacement, in the canonical order of aggregation."""
    wanted = min(len(clients), cohort_size(plan))
    drawn = rng.choice(len(clients), size=wanted, replace=False)
    return tuple(clients[index] for index in np.sort(drawn).tolist())


def weight_limit(declared: Collection[int], cap: float) -> int | None:
    """The most examples that one update counts for: `cap` times the (lower) median of what a cohort declared.

    None, no limit, if `cap` is 0 or no client declared anything.
    """
    return int(cap * median_low(declared)) if cap and declared else None


def make_tasks(cohort: Sequence[str], round_number: int, base: str, plan: RunPlan) -> Tasks:
    """The tasks of a cohort; each client's seed depends only on the round and its name."""
    # As `generator(plan.seed, client, round_number)` of each.
    words = [zlib.crc32(client.encode()) for client in cohort]
    seeds = seeding.states_for([plan.seed], words, [round_number]).first_integers()
    shared = TaskMessage(
        round=round_number,
        client="",
        base=base,
        seed=0,
        batch_size=plan.local.batch_size,
        lr=plan.local.lr,
        epochs=plan.local.epochs,
        steps=plan.local.steps,
        rule=client_rules.to_options(plan.strategy.client_rule),
        momentum=plan.local.momentum,
        clip_grad_norm=plan.local.clip_grad_norm,
        code=plan.code_options,
        optimizer=plan.local.optimizer_options,
        clip_norm=plan.clip_norm,
        noise=plan.noise_options,
    )
    return Tasks(shared, tuple(cohort), seeds)
