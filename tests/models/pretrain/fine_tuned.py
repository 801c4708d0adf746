"""A fine-tuning of few params under any plan: losses, and what is left of it. Runs in the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.job import read_params
from models.pretrain import plan as plans
from models.pretrain import trainer, world
from models.pretrain.initial import with_params
from models.pretrain.recovery import fine_tuning
from models.pretrain.recovery.checkpoint import Checkpointer, Policy
from models.zoo import ModelSpec
from tests.models.pretrain.curves import settings, spec_of, tokens


def spec_on(base: Path, adapt: str, model: dict[str, Any]) -> ModelSpec:
    return with_params(spec_of(**model), base, new_head=False, adapt=adapt, sha256="base")


def losses(
    cases: Sequence[tuple[str, dict[str, Any]]], base: Path, adapt: str, options: dict[str, Any]
) -> list[tuple[list[float], dict[str, Any] | None]]:
    """Of each plan and model: losses, and on the first process the merged params.

    Raises:
        Exception: whatever the first that fails raises, with its plan as a note.
    """
    found = []
    with world.join(plans.parse(cases[0][0])) as first:
        for plan, model in cases:
            try:
                here = world.build(plans.parse(plan), first.device)
                spec = spec_on(base / f"{model.get('name', 'gpt')}.safetensors", adapt, model)
                training = trainer.build(spec, tokens(), settings(**options), here, seed=5)
                for _ in range(training.steps):
                    training.train_step()
                curve = training.losses()
                path = base / "tuned.safetensors"
                saved = fine_tuning.save_parts(training.parallel.parts, spec, here, path)
                found.append((curve, read_params(path) if saved else None))
            except Exception as error:
                error.add_note(f"plan {plan}, model {model}")
                raise
    return found


def saved_and_resumed(
    plan: str, base: Path, folder: Path, resume: bool
) -> tuple[int, list[str], list[float]]:
    """Step resumed from, names of the optimizer's params, and losses of the remaining steps; saves after three."""
    with world.join(plans.parse(plan)) as here:
        spec = spec_on(base / "gpt.safetensors", "lora(2)", {})
        training = trainer.build(spec, tokens(), settings(), here, seed=5)
        checkpointer = Checkpointer(folder, Policy(every=3, background=False), training.identity, here)
        begun = training.step = checkpointer.restore(training.state) if resume else 0
        while training.step < training.steps:
            training.train_step()
            if training.step == 3 and not resume:
                checkpointer.save(training.state, 3)
                training.losses()
        state = replace(training.state, rank_state=None)
        return begun, sorted(state.tensors_to_save()), training.losses()
