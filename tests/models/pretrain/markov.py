"""Trainings of a small transformer on a made-up language, with what each sent: for exchanges that are no exact sums.
Runs in the ranks.

The language is a Markov chain in which every token has four successors, so that no model's loss can fall below the
chain's entropy, and losses of different trainings can be compared as ratios.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.data.batches import Arrays
from models.pretrain.training import TrainingOptions
from models.zoo import gpt
from tests.support import traffic

VOCAB = 64
LENGTH = 16
ODDS = (0.6, 0.2, 0.1, 0.1)
ENTROPY = -sum(odd * np.log(odd) for odd in ODDS)
LAST = 30
"""Steps over which a final loss is the mean."""


@dataclass(frozen=True)
class Training:
    """What came of one.

    Attributes:
        first, loss: mean loss of the first batch, and of the last `LAST`.
        sent_bytes: by this process, in all steps.
        values: of the model.
        step_seconds: every step's.
    """

    first: float
    loss: float
    sent_bytes: int
    values: int
    step_seconds: list[float]


def trained(plans_: Sequence[str], steps: int = 200, width: int = 64, **options: Any) -> list[Training]:
    """Trainings under several plans of the same processes, all at the same time, a step of each in turn: what slows
    the machine slows all of them."""
    with world.join(plans.parse(plans_[0])) as first:
        spec = gpt.spec((LENGTH,), VOCAB, width=width, layers=2, heads=4)
        given = TrainingOptions(**{"steps": steps, "batch_size": 32, "lr": 3e-3, "warmup": 10, **options})
        trainings = [
            trainer.build(spec, sentences(), given, world.build(plans.parse(plan), first.device), seed=1)
            for plan in plans_
        ]
        sent: list[int] = [0] * len(trainings)
        seconds: list[list[float]] = [[] for _ in trainings]
        for step in range(steps):
            for number, training in enumerate(trainings):
                before, began = traffic.sent_bytes(), time.perf_counter()
                training.train_step()
                if step == steps - 1 and training.local is not None:
                    training.local.synchronize()
                seconds[number].append(time.perf_counter() - began)
                sent[number] += traffic.sent_bytes() - before
        return [
            _came_of(training, bytes_, times)
            for training, bytes_, times in zip(trainings, sent, seconds, strict=True)
        ]


def _came_of(training: trainer.Trainer, sent_bytes: int, step_seconds: list[float]) -> Training:
    losses = training.losses()
    values = sum(p.numel() for part in training.parallel.parts for p in part.parameters())
    return Training(losses[0], float(np.mean(losses[-LAST:])), sent_bytes, values, step_seconds)


def sentences(rows: int = 4000) -> Arrays:
    """[rows, LENGTH] and the token after each."""
    rng = np.random.default_rng(11)
    successors = np.stack([rng.choice(VOCAB, len(ODDS), replace=False) for _ in range(VOCAB)])
    ids = np.empty((rows, LENGTH + 1), np.int32)
    ids[:, 0] = rng.integers(VOCAB, size=rows)
    for place in range(LENGTH):
        ids[:, place + 1] = successors[ids[:, place], rng.choice(len(ODDS), size=rows, p=ODDS)]
    return Arrays(ids[:, :-1], ids[:, 1:])
