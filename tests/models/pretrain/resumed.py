"""Trainings that are saved under one plan and go on under another. Runs in the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.checkpoint import Checkpointer, Policy
from tests.models.pretrain.curves import settings, small_gpt, tokens

SAVED_AT = 3


def saved(plan: str, folder: Path, model: dict[str, Any] | None = None, **options: Any) -> list[float]:
    """Trains `SAVED_AT` steps, begins to save, and trains on while that is written: all losses."""
    with world.join(plans.parse(plan)) as here:
        training, checkpointer = begin(here, folder, model, **options)
        losses = steps(training, SAVED_AT)
        checkpointer.save(training.state, training.step)
        losses += steps(training, training.steps)
        checkpointer.wait()
        return losses


def resumed(
    plan: str, folders: dict[str, Path], model: dict[str, Any] | None = None, **options: Any
) -> dict[str, tuple[list[float], list[list[int]]]]:
    """For every folder the losses of the steps after its newest checkpoint, and the rows of their batches."""
    found = {}
    with world.join(plans.parse(plan)) as here:
        for name, folder in folders.items():
            training, checkpointer = begin(here, folder, model, **options)
            training.step = checkpointer.restore(training.state)
            rows = [training.batches.rows(step).tolist() for step in range(training.step, training.steps)]
            found[name] = (steps(training, training.steps), rows)
    return found


def begin(
    here: world.World, folder: Path, model: dict[str, Any] | None = None, **options: Any
) -> tuple[trainer.Trainer, Checkpointer]:
    training = trainer.build(small_gpt(**model or {}), tokens(), settings(**options), here, seed=5)
    return training, Checkpointer(folder, Policy(), training.identity, here)


def steps(training: trainer.Trainer, last: int) -> list[float]:
    losses = []
    while training.step < last:
        training.train_step()
        losses += training.losses()
    return losses
