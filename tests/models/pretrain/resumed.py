"""Trainings that are saved under one plan and go on under another. Runs in the ranks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.recovery.checkpoint import Checkpointer, Policy
from models.pretrain.recovery.manifest import path_of, steps_in
from models.zoo import ModelSpec
from tests.models.pretrain.curves import settings, spec_of, tokens

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


def trained(
    plans_: Sequence[str], folders: Sequence[Path | None]
) -> list[tuple[list[float], float, list[str]]]:
    """For every plan, trained to the end with a checkpoint after every step, or without any: losses, sum of squares of
    this process's params, and what was said. Goes on where the plan's folder has a checkpoint."""
    found = []
    with world.join(plans.parse(plans_[0])) as first:
        for plan, folder in zip(plans_, folders, strict=True):
            here = world.build(plans.parse(plan), first.device)
            training, checkpointer = begin(here, folder or Path())
            checkpointer.policy = Policy(every=1, keep=100)
            if folder is not None:
                training.step = checkpointer.restore(training.state)
            losses: list[float] = []
            trainer.train(
                training,
                lambda progress, losses=losses: losses.extend(progress.losses),  # type: ignore[misc]
                1,
                None if folder is None else checkpointer,
            )
            params = [p.detach() for part in training.parallel.parts for p in part.parameters()]
            local = [p.to_local() if hasattr(p, "to_local") else p for p in params]
            total = float(sum(p.double().square().sum() for p in local))
            found.append((losses, total, checkpointer.notices))
    return found


def drop_after(folder: Path, step: int) -> None:
    """Removes the checkpoints of later steps."""
    for later in steps_in(folder):
        if later > step:
            shutil.rmtree(path_of(folder, later))


def begin(
    here: world.World,
    folder: Path,
    model: dict[str, Any] | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[trainer.Trainer, Checkpointer]:
    spec = with_dropout(spec_of(**model or {}), dropout)
    training = trainer.build(spec, tokens(), settings(**options), here, seed=5)
    return training, Checkpointer(folder, Policy(), training.identity, here)


def with_dropout(spec: ModelSpec, probability: float) -> ModelSpec:
    """`spec` with features dropped before the head."""

    def build() -> nn.Module:
        module = spec.module()
        module.norm = nn.Sequential(module.norm, nn.Dropout(probability))
        return module

    return replace(spec, module=build) if probability else spec


def steps(training: trainer.Trainer, last: int) -> list[float]:
    losses = []
    while training.step < last:
        training.train_step()
        losses += training.losses()
    return losses
