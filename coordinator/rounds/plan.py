"""What a run will do, decided before it starts, and whom a round asks.

Randomness is derived, never carried along: the generator of round r is seeded by (seed, purpose, r), so a
resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from edge_client.wire.messages import TaskMessage
from strategies import client_rules
from strategies.strategy import Strategy


@dataclass(frozen=True)
class LocalWork:
    """What every client does in a round: exactly one of `epochs` and `steps` is set."""

    batch_size: int
    lr: float
    epochs: int | None
    steps: int | None


@dataclass(frozen=True)
class RunPlan:
    """One federated training.

    Attributes:
        trainable: names of the tensors that clients train.
        clients_per_round: accepted updates that close a round.
        over_select: how many times as many clients are asked, >= 1.
        deadline_seconds: on the fleet's clock, from the start of the round.
        min_updates: quorum at the deadline; with fewer the round changes nothing.
        max_examples: the most that one client may claim; None: any.
        outlier_factor: how many times as long as the others' an update's steps may be (`rounds.outliers`); 0: any.
        weight_cap: how many times the cohort's median number of examples one update may weigh; 0: any.
    """

    seed: int
    rounds: int
    strategy: Strategy
    local: LocalWork
    trainable: tuple[str, ...]
    clients_per_round: int
    over_select: float = 1.0
    deadline_seconds: float = 600.0
    min_updates: int = 1
    max_examples: int | None = None
    outlier_factor: float = 0.0
    weight_cap: float = 0.0


@dataclass(frozen=True)
class Task:
    """One position of a cohort: who, and the message that goes there."""

    position: int
    message: TaskMessage


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """The generator for one purpose, such as `("cohort", round)`; independent across purposes and numbers."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *numbers]))


def cohort_size(plan: RunPlan) -> int:
    """Clients a round asks, where there are as many."""
    return math.ceil(plan.clients_per_round * plan.over_select)


def choose_cohort(clients: Sequence[str], plan: RunPlan, rng: np.random.Generator) -> tuple[str, ...]:
    """Clients for one round, drawn without replacement, in the canonical order of aggregation."""
    wanted = min(len(clients), cohort_size(plan))
    drawn = rng.choice(len(clients), size=wanted, replace=False)
    return tuple(clients[index] for index in sorted(drawn))


def weight_limit(declared: Collection[int], cap: float) -> int | None:
    """The most examples that one update counts for: `cap` times the median of what a cohort declared, of two the lower.

    None, any number, where `cap` is 0 or nobody declared anything.
    """
    return int(cap * median_low(declared)) if cap and declared else None


def tasks_for(cohort: Sequence[str], round_number: int, base: str, plan: RunPlan) -> tuple[Task, ...]:
    """The tasks of a cohort; each client's seed depends on the round and its name only."""
    rule = client_rules.to_options(plan.strategy.client_rule)
    return tuple(
        Task(
            position,
            TaskMessage(
                round=round_number,
                client=client,
                base=base,
                seed=int(generator(plan.seed, client, round_number).integers(2**63)),
                batch_size=plan.local.batch_size,
                lr=plan.local.lr,
                epochs=plan.local.epochs,
                steps=plan.local.steps,
                rule=rule,
            ),
        )
        for position, client in enumerate(cohort)
    )
