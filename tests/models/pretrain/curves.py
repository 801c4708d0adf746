"""Loss curves of small models on made-up data under any plan: what the parity tests compare. Runs in the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.batches import Arrays
from models.pretrain.optimizers import Options
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


def settings(**options: Any) -> Options:
    """Adam with an epsilon that does not blow up rounding differences in near-zero gradients."""
    return Options(**{"steps": STEPS, "batch_size": BATCH, "lr": 1e-2, "eps": 1e-6, **options})


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
