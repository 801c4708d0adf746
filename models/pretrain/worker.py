"""One process of a pretraining: `python -P -m models.pretrain.worker JOB.json`, alone or under torchrun.

The job file (see `models.job`) has `plan`, a table of `models.pretrain.plan.ParallelPlan`, whose dp fills up with
the processes there are; options are `models.pretrain.optimizers.Options`, data as in `models.pretrain.sources`,
params to begin with as in `models.pretrain.initial`. Process 0 reports progress and writes `model.safetensors` and `result.json`.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from edge_client import process
from models import job as jobs
from models.pretrain import evaluation, initial, params, prefetch, sources, trainer, world
from models.pretrain import plan as plans
from models.pretrain.optimizers import Options

REPORTS = 200
"""About how often a training tells how it goes."""


def pretrain(path: Path, report: process.Report) -> None:
    """The whole job of one process."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, options = job.spec(), job.options(Options)
    plan = plan_of(job, int(os.environ.get("WORLD_SIZE", 1)))
    data = sources.of(job, spec, options.shift)
    spec = initial.starting(job, spec)

    with world.join(plan) as here:
        training = trainer.build(spec, data.train, options, here, job.seed)
        loader = prefetch.of(job, training.batches, here.device)
        training.batches = loader
        first = here.rank == 0
        epochs = -(-training.steps // training.batches.steps_per_epoch)

        def on_progress(progress: trainer.Progress) -> None:
            if first:
                report(
                    stage="pretrain",
                    step=progress.step,
                    steps=progress.steps,
                    epoch=progress.epoch,
                    epochs=epochs,
                    loss=sum(progress.losses) / len(progress.losses),
                    lr=progress.rate,
                    seconds=progress.seconds,
                    stall_share=loader.stall_share(progress.seconds),
                )

        if first:
            report(stage="pretrain", step=0, steps=training.steps, epoch=0, epochs=epochs)
        losses = trainer.train(training, on_progress, max(1, training.steps // REPORTS))
        whole = params.gather(training.parallel.parts, spec, here)
        if whole is not None:
            figures = evaluation.evaluate(whole.to(here.device), spec, data.test, here.device)
            saved = params.save(whole, job.out / "model.safetensors")
            about: dict[str, Any] = {
                "world_size": here.processes,
                "device": here.device.type,
                "backend": here.backend,
                "plan": str(plan),
                "seconds": time.perf_counter() - started,
                "stall_seconds": loader.waited_seconds,
            }
            jobs.write_result(job.out, {**figures, **saved, **about, **data.about, "losses": losses})


def plan_of(job: jobs.Job, processes: int) -> plans.ParallelPlan:
    """The plan of a job, its dp as large as `processes` allow where it names none."""
    given = job.settings.get("plan", {})
    if not isinstance(given, dict):
        raise jobs.JobError(f"{job.path}: plan is {given!r}, expected an object")
    try:
        plan = plans.from_table(given)
    except plans.PlanError as error:
        raise jobs.JobError(f"{job.path}: {error}") from None
    return plan if "dp" in given else replace(plan, dp=max(1, processes // plan.processes))


if __name__ == "__main__":
    process.serve(pretrain)
