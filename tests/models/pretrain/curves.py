"""Loss curves of small models on made-up data under any plan: what the parity tests compare. Runs in the ranks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models import zoo
from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.data.batches import Arrays
from models.pretrain.training import TrainingOptions
from models.zoo import ModelSpec, gpt

STEPS = 6
BATCH = 8
LENGTH = 16
VOCAB = 48


def curve(plan: str, model: dict[str, Any] | None = None, **options: Any) -> list[float]:
    """Losses of a training under `plan`."""
    with world.join(plans.parse(plan)) as here:
        training = trainer.build(small_gpt(**model or {}), tokens(), settings(**options), here, seed=5)
        losses: list[float] = []
        for _ in range(training.steps):
            training.train_step()
            losses += training.losses()
        return losses


@dataclass(frozen=True)
class Case:
    """A training to compare.

    Attributes:
        model: as `spec_of` takes it.
        options: of training.
        broken: a function that takes a collective away, `package.module:function` of a context manager.
    """

    plan: str
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    broken: str = ""


def curves(cases: Sequence[Case]) -> list[list[float]]:
    """Losses of several trainings by the same processes, one after the other.

    Raises:
        Exception: whatever the first that fails raises, with its plan as a note.
    """
    found = []
    with world.join(plans.parse(cases[0].plan)) as first:
        for case in cases:
            try:
                found.append(_curve(case, world.build(plans.parse(case.plan), first.device)))
            except Exception as error:
                error.add_note(f"plan {case.plan}, model {case.model}")
                raise
    return found


def _curve(case: Case, here: world.World) -> list[float]:
    with _broken(case.broken):
        training = trainer.build(spec_of(**case.model), tokens(), settings(**case.options), here, seed=5)
        losses: list[float] = []
        for _ in range(training.steps):
            training.train_step()
            losses += training.losses()
        return losses


def _broken(name: str) -> AbstractContextManager[None]:
    if not name:
        return nullcontext()
    module, _, function = name.partition(":")
    taken_away: AbstractContextManager[None] = getattr(importlib.import_module(module), function)()
    return taken_away


def settings(**options: Any) -> TrainingOptions:
    """Adam with an epsilon that does not blow up rounding differences in near-zero gradients."""
    return TrainingOptions(**{"steps": STEPS, "batch_size": BATCH, "lr": 1e-2, "eps": 1e-6, **options})


def spec_of(name: str = "gpt", vocab: int = VOCAB, **options: Any) -> ModelSpec:
    """A small model by name, or by `package.module:build`."""
    if ":" not in name:
        options = {"width": 32, "layers": 4, "heads": 4} | options
    return zoo.get(name, input_shape=(LENGTH,), classes=vocab, **options)


def small_gpt(vocab: int = VOCAB, width: int = 32, layers: int = 4, heads: int = 4) -> ModelSpec:
    return gpt.spec((LENGTH,), vocab, width=width, layers=layers, heads=heads)


def tokens(rows: int = 20) -> Arrays:
    """Sequences that count up from a random start, some labels not counting."""
    rng = np.random.default_rng(3)
    ids = (
        rng.integers(VOCAB, size=(rows, 1)) + np.arange(LENGTH + 1) * rng.integers(1, 4, size=(rows, 1))
    ) % VOCAB
    y = ids[:, 1:].astype(np.int32)
    y[::5, :4] = -1
    return Arrays(ids[:, :-1].astype(np.int32), y)
