"""One process of a pretraining: `python -P -m models.pretrain.worker JOB.json`, alone or under `launch`.

The job file (see `models.job`) has `plan`, a table of `models.pretrain.plan.ParallelPlan`, whose dp fills up with
the processes there are; options are `models.pretrain.training.Options`, data as in `models.pretrain.data.sources`, params to
begin with as in `models.pretrain.initial`. Process 0 reports progress and writes `curve.jsonl`, `model.safetensors` and `result.json`.

With `checkpoint`, a table of `models.pretrain.recovery.checkpoint.Policy`, the training goes on from the newest checkpoint in
its folder, under whatever plan it now has; with `resume = false` from those of the same launch only. On SIGTERM it
finishes a step, saves it and exits with status 75.

With `profile`, a table of `models.pretrain.training.Profile`, it says where the time of some steps went. When no step
ends for `hang_seconds`, 300 unless given, the processes write where they are and end (`models.pretrain.recovery.hang`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge_client import process
from models import job as jobs
from models.pretrain import check, evaluation, initial, params, profiling, trainer, world
from models.pretrain.data import prefetch, sources
from models.pretrain.recovery import hang
from models.pretrain.recovery.checkpoint import Checkpointer, Policy
from models.pretrain.recovery.curve import NAME as CURVE
from models.pretrain.recovery.curve import Curve
from models.pretrain.recovery.preemption import PREEMPTED, REFUSED, Preemption
from models.pretrain.training import Options, Profile
from models.zoo import ModelSpec

REPORTS = 200
"""About how often a training tells how it goes."""

HANG_SECONDS = 300
"""Without a step, a checkpoint included; torch itself gives up on a collective after ten minutes."""


def pretrain(path: Path, report: process.Report) -> None:
    """The whole job of one process."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, options = job.spec(), job.options(Options)
    policy, resume = job.table("checkpoint", Policy), job.flag("resume", True)
    profile, hang_seconds = job.table("profile", Profile), _hang_seconds(job)
    plan = check.plan_of(job, int(os.environ.get("WORLD_SIZE", 1)))
    data = sources.of(job, spec, options.shift)
    spec = initial.starting(job, spec)

    hang.prepare()
    with world.join(plan) as here:
        training = trainer.build(spec, data.train, options, here, job.seed)
        loader = prefetch.of(job, training.batches, here.device)
        training.batches = loader
        checkpointer = None if policy is None else _checkpointer(job, policy, training)
        if checkpointer is not None:
            training.step = checkpointer.restore(training.state, anew=not resume)
        curve = Curve(job.out / CURVE)
        told = _Told(training, str(plan), curve, options, loader, report) if here.rank == 0 else None
        preemption = None if checkpointer is None else Preemption()
        every = max(1, training.steps // REPORTS)
        stop = preemption.agreed if preemption else lambda: False
        around = _profiled(profile, job, training, spec)
        with _watched(around, job, here, hang_seconds, report) as watched:
            trainer.train(training, told or (lambda progress: None), every, checkpointer, stop, watched)
        if preemption is not None:
            preemption.close()
        if training.step < training.steps:
            if told:
                report(stage="pretrain", status="preempted", step=training.step, steps=training.steps)
            raise SystemExit(PREEMPTED)
        whole = params.gather(training.parallel.parts, spec, here)
        if whole is not None:
            figures = evaluation.evaluate(whole.to(here.device), spec, data.test, here.device)
            saved = params.save(whole, job.out / "model.safetensors")
            about: dict[str, Any] = {
                "world_size": here.processes,
                "device": here.device.type,
                "backend": here.backend,
                "plan": str(plan),
                "restarts": _restarts(),
                "seconds": time.perf_counter() - started,
                "stall_seconds": loader.waited_seconds,
            }
            jobs.write_result(job.out, {**figures, **saved, **about, "losses": curve.losses()})


@dataclass(frozen=True)
class _Told:
    """What the first process tells of the training: to the curve, which a restart goes on with, and as progress."""

    training: trainer.Trainer
    plan: str
    curve: Curve
    options: Options
    loader: prefetch.Loader
    report: process.Report

    def __post_init__(self) -> None:
        step, steps = self.training.step, self.training.steps
        self.curve.cut(step)
        epoch = step // self.training.batches.steps_per_epoch
        self.report(stage="pretrain", step=step, steps=steps, epoch=epoch, epochs=self._epochs)

    @property
    def _epochs(self) -> int:
        return -(-self.training.steps // self.training.batches.steps_per_epoch)

    def __call__(self, progress: trainer.Progress) -> None:
        done = len(progress.losses)
        self.curve.add(
            progress.step - done + 1,
            progress.losses,
            [self.options.rate(step, progress.steps) for step in range(progress.step - done, progress.step)],
            rows_per_second=done * self.options.batch_size / progress.seconds,
            plan=self.plan,
            restart=_restarts(),
        )
        self.report(
            stage="pretrain",
            step=progress.step,
            steps=progress.steps,
            epoch=progress.epoch,
            epochs=self._epochs,
            loss=sum(progress.losses) / done,
            lr=progress.rate,
            seconds=progress.seconds,
            stall_share=self.loader.stall_share(progress.seconds),
        )


def _restarts() -> int:
    """How often the launcher began anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


Around = Callable[[int], AbstractContextManager[None]]


def _profiled(options: Profile | None, job: jobs.Job, training: trainer.Trainer, spec: ModelSpec) -> Around:
    if options is None:
        return lambda step: nullcontext()
    needed = options.start + options.steps
    if training.steps < needed:
        raise jobs.JobError(
            f"{job.path}: profile.start + profile.steps is {needed}, expected at most the {training.steps} steps there are"
        )
    return profiling.Profiler(options, job.out, spec, training.world, training.options.batch_size).around


@contextmanager
def _watched(
    around: Around, job: jobs.Job, here: world.World, seconds: float, report: process.Report
) -> Iterator[Around]:
    """`around`, and an end to the process when no step ends for `seconds`."""
    watch = hang.Watch(job.out, here.rank, here.processes, seconds, hang.ending(report))

    def both(step: int) -> AbstractContextManager[None]:
        watch.alive(step)
        return around(step)

    try:
        yield both
    finally:
        watch.close()


def _hang_seconds(job: jobs.Job) -> float:
    seconds = job.settings.get("hang_seconds", HANG_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 86_400:
        raise jobs.JobError(
            f"{job.path}: hang_seconds is {seconds!r}, expected a number above 0, at most 86400"
        )
    return float(seconds)


def _checkpointer(job: jobs.Job, policy: Policy, training: trainer.Trainer) -> Checkpointer:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return Checkpointer(job.out / policy.folder, policy, training.identity, training.world, run)


def work(path: Path, report: process.Report) -> None:
    """`pretrain`, with an exit status of its own where the job is wrong."""
    try:
        pretrain(path, report)
    except ValueError as error:
        if type(error) is ValueError:
            raise
        report(error=str(error))
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    process.serve(work)
