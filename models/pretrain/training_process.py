"""One process of a pretraining: `python -P -m models.pretrain.training_process JOB.json`, alone or under `launch`.

The job file (see `models.job`) has `plan`, a table of `models.pretrain.plan.ParallelPlan`, whose dp defaults to the
remaining processes; options are `models.pretrain.training.TrainingOptions`, data as in `models.pretrain.data.sources`, initial
params as in `models.pretrain.initial`. Process 0 reports progress and writes `curve.jsonl`, `model.safetensors` and
`result.json`.

With `checkpoint`, a table of `models.pretrain.recovery.checkpoint.Policy`, the training resumes from the newest
checkpoint in its folder, under any plan; with `resume = false`, only from checkpoints of the same launch. On SIGTERM it
finishes a step, saves it and exits with status 75.

With `options.validate_every` it holds `validation_rows` out of the training set and scores the model on them every so
many steps (`models.pretrain.validation`).

With `profile`, a table of `models.pretrain.training.ProfileOptions`, it reports where the time of some steps went. When no step
ends for `hang_seconds`, 300 by default, the processes write where they are and exit (`models.pretrain.recovery.hang`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from edge_client.processes import process
from models import job as jobs
from models.pretrain import check, initial, params, profiling, trainer, validation, world
from models.pretrain.data import documents, prefetch, sources
from models.pretrain.recovery import fine_tuning, hang
from models.pretrain.recovery.checkpoint import Checkpointer, Policy
from models.pretrain.recovery.curve import NAME as CURVE
from models.pretrain.recovery.curve import REPORTS, Curve
from models.pretrain.recovery.preemption import Preemption
from models.pretrain.recovery.statuses import PREEMPTED, REFUSED
from models.pretrain.training import ProfileOptions, TrainingOptions
from models.zoo.spec import ModelSpec

HANG_SECONDS = 300.0
"""Longest time without a step, checkpoint included; torch itself aborts a collective after ten minutes."""


Around = Callable[[int], AbstractContextManager[None]]


def pretrain(path: Path, report: process.Report, outside: Around = lambda step: nullcontext()) -> None:
    """Runs one process of the job. `outside` gives a context of every step, beside this process's own."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, options = documents.spec_of(job), job.options(TrainingOptions)
    policy, resume = job.table("checkpoint", Policy), job.flag("resume", True)
    profile = job.table("profile", ProfileOptions)
    hang_seconds = job.number("hang_seconds", HANG_SECONDS, 0.1, 86_400)
    plan = check.plan_of(job, int(os.environ.get("WORLD_SIZE", 1)))
    data = sources.from_job(job, spec, options.shift, validate=options.validate_every > 0)
    spec = initial.with_init(job, spec)

    hang.prepare()
    with world.join(plan) as here, ExitStack() as stack:
        training = trainer.build(spec, data.train, options, here, job.seed)
        loader = stack.enter_context(closing(prefetch.from_job(job, training.batches, here.device)))
        training.batches = loader
        if training.note and here.rank == 0:
            report(stage="pretrain", note=training.note)
        checkpointer = None if policy is None else _resume(job, policy, training, report, resume)
        curve = Curve(job.out / CURVE)
        progress = _ProgressWriter(training, curve, loader, report) if here.rank == 0 else None
        preemption = None if checkpointer is None else Preemption()
        stop = preemption.should_stop if preemption else lambda: False
        every = max(1, training.steps // REPORTS)
        profiler = None if profile is None else _profiler(profile, job, training, spec)
        end = partial(hang.exit_hung, report)
        watchdog = hang.Watchdog(job.out, here.rank, plan.processes, hang_seconds, end)

        def around(step: int) -> AbstractContextManager[None]:
            watchdog.heartbeat(step)
            return outside(step) if profiler is None else profiler.around(step)

        scoring = _validation(training, spec, data, watchdog)
        if checkpointer is not None:
            checkpointer.restore_best(curve.validation_losses() if here.rank == 0 else {})
        with closing(watchdog):
            trainer.train(training, progress or (lambda _: None), every, checkpointer, stop, around, scoring)
        if preemption is not None:
            preemption.complete()
        if training.step < training.steps:
            if progress:
                report(stage="pretrain", status="preempted", step=training.step, steps=training.steps)
            raise SystemExit(PREEMPTED)
        about = {"seconds": time.perf_counter() - started, "stall_seconds": loader.waited_seconds}
        _write_result(job, spec, data, training, checkpointer, curve, about)


def _validation(
    training: trainer.Trainer, spec: ModelSpec, data: sources.Data, watchdog: hang.Watchdog
) -> validation.Validation | None:
    if data.validation is None:
        return None
    return validation.build(training, spec, data.validation, lambda: watchdog.heartbeat(training.step))


def _write_result(
    job: jobs.JobFile,
    spec: ModelSpec,
    data: sources.Data,
    training: trainer.Trainer,
    checkpointer: Checkpointer | None,
    curve: Curve,
    about: Mapping[str, float],
) -> None:
    """Writes the params of the last or the best model, its scores on the test set, and the figures of the training."""
    here, step = training.world, training.step
    if checkpointer is not None and checkpointer.policy.result == "best":
        checkpointer.load_best(training.state)
        step = checkpointer.best[0] or step
    scores = validation.final_scores(training, spec, data.test)
    save = fine_tuning.save_parts if spec.frozen else params.save_parts
    saved = save(training.parallel.parts, spec, here, job.out / "model.safetensors")
    if saved is None:
        return
    result = {
        **scores.document(),
        **saved,
        **data.about,
        "world_size": here.plan.processes,
        "device": here.device.type,
        "backend": str(dist.get_backend()),
        "plan": str(here.plan),
        "restarts": _restarts(),
        **about,
        "losses": curve.losses(),
    }
    validated = curve.validation_losses()
    if data.validation is not None and validated:
        best = min(validated, key=lambda each: (validated[each], each))
        result["validation"] = {
            "rows": len(data.validation),
            "last_loss": validated[max(validated)],
            "best_loss": validated[best],
            "best_step": best,
            "result_step": step,
        }
    jobs.write_result(job.out, result)


def _resume(
    job: jobs.JobFile, policy: Policy, training: trainer.Trainer, report: process.Report, any_run: bool
) -> Checkpointer:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    checkpointer = Checkpointer(job.out / policy.folder, policy, training.identity, training.world, run)
    training.step = checkpointer.restore(training.state, same_run=not any_run)
    for notice in checkpointer.notices:
        report(stage="pretrain", note=notice)
    return checkpointer


@dataclass(frozen=True)
class _ProgressWriter:
    """Writes the progress of a training: to the curve, which a restart continues, and to the reports."""

    training: trainer.Trainer
    curve: Curve
    loader: prefetch.Loader
    report: process.Report

    def __post_init__(self) -> None:
        self.curve.cut(self.training.step)
        self._report(epoch=self.training.step // self.loader.steps_per_epoch)

    def __call__(self, progress: trainer.Progress) -> None:
        training, options, done = self.training, self.training.options, len(progress.losses)
        step, steps = training.step, training.steps
        rates = [options.rate(each, steps) for each in range(step - done, step)]
        self.curve.add(
            step - done + 1,
            progress.losses,
            rates,
            progress.validation_loss,
            durable=progress.lasting,
            rows_per_second=done * options.batch_size / progress.seconds,
            plan=str(training.world.plan),
            restart=_restarts(),
        )
        scored = {} if progress.validation_loss is None else {"validation_loss": progress.validation_loss}
        self._report(
            epoch=-(-step // self.loader.steps_per_epoch),
            **scored,
            loss=sum(progress.losses) / done,
            lr=options.rate(step - 1, steps),
            seconds=progress.seconds,
            stall_share=self.loader.stall_share(progress.seconds),
        )

    def _report(self, epoch: int, **figures: float) -> None:
        step, steps = self.training.step, self.training.steps
        epochs = -(-steps // self.loader.steps_per_epoch)
        self.report(stage="pretrain", step=step, steps=steps, epoch=epoch, epochs=epochs, **figures)


def _restarts() -> int:
    """Number of restarts by the launcher."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _profiler(
    options: ProfileOptions, job: jobs.JobFile, training: trainer.Trainer, spec: ModelSpec
) -> profiling.Profiler:
    needed = options.start + options.steps
    if training.steps < needed:
        raise jobs.JobError(
            f"{job.path}: profile.start + profile.steps is {needed}, expected at most the {training.steps} steps there are"
        )
    return profiling.Profiler(options, job.out, spec, training.world, training.options.batch_size)


def work(path: Path, report: process.Report) -> None:
    """Runs `pretrain`, with its own exit status for an invalid job."""
    try:
        pretrain(path, report)
    except ValueError as error:
        if type(error) is ValueError:
            raise
        report(error=str(error))
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    process.serve(work, {"check": check.check})
