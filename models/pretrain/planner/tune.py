"""`python -P -m models.pretrain.planner.tune JOB.json`: searches for a learning rate, warm-up and batch size.

    draw candidates -> train each on few rows -> keep the best third -> train these on three times as many -> … -> best

Successive halving (Jamieson and Talwalkar 2016, figure 3; its bracket in Li 2018, Algorithm 1): every round has the same
total of rows, shared by ever fewer candidates. Rows rather than steps, so that large batches do not get more training
than small ones. Every training starts anew from the job's seed, and follows its schedule as if it ran to the last step.
Candidates are evaluated on rows of the training set that none of them trains on; the test set is not used.

Besides what `models.pretrain.training_process` reads, the job may have `tune`, a table of `TuneOptions`. Writes `result.json`:

    {"table": [{"round", "candidate", "lr", "warmup", "batch_size", "steps", "loss"}, …],
     "best": {"candidate", "lr", "warmup", "batch_size", "steps", "loss"}}

Candidate 0 has the job's own options. A loss that is not finite is written as null and ranks last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_client.processes import process
from models import job as jobs
from models.options import bounded
from models.pretrain import evaluation, initial, trainer, world
from models.pretrain.data import documents, held_out, sources
from models.pretrain.data.batches import Source
from models.pretrain.plan import ParallelPlan
from models.pretrain.training import TrainingOptions, validation_rows

TUNED = ("lr", "warmup", "batch_size")


@dataclass(frozen=True)
class TuneOptions:
    """The search space and budget. Values are drawn log-uniformly between their bounds.

    Attributes:
        candidates: in the first round.
        steps: of each candidate in the first round, at the job's batch size; later rounds have more.
        eta: one in `eta` candidates advances to the next round.
        lr_least, lr_most: 0: a thirtieth of the job's, thirty times it.
        warmup_most: steps; 0: a tenth of the training's.
        batch_least, batch_most: rows; 0: the job's.
        held_back: rows of the training set for evaluating candidates; 0: a tenth of it, at most 1024.
    """

    candidates: int = bounded(9, 2, 10_000)
    steps: int = bounded(20, 1, 1_000_000)
    eta: int = bounded(3, 2, 100)
    lr_least: float = bounded(0.0, 0.0, 1e3)
    lr_most: float = bounded(0.0, 0.0, 1e3)
    warmup_most: int = bounded(0, 0, 100_000_000)
    batch_least: int = bounded(0, 0, 1_000_000)
    batch_most: int = bounded(0, 0, 1_000_000)
    held_back: int = bounded(0, 0, 1_000_000)


@dataclass(frozen=True)
class Round:
    """Number of candidates, and rows that each trains on."""

    candidates: int
    rows: int


@dataclass(frozen=True)
class Tried:
    """One candidate in one round."""

    round: int
    candidate: int
    options: TrainingOptions
    steps: int
    loss: float


def tune(path: Path, report: process.Report) -> None:
    """Tunes a job."""
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, base = documents.spec_of(job), job.options(TrainingOptions)
    settings = job.table("tune", TuneOptions) or TuneOptions()
    train, held_back = split(sources.from_job(job, spec, base.shift).train, settings.held_back, job)
    spec = initial.with_init(job, spec)
    drawn = draw(settings, base, len(train), np.random.default_rng([job.seed, 1]))
    plan = rounds(settings.candidates, settings.steps * base.batch_size, settings.eta)
    trainings, done = sum(each.candidates for each in plan), 0

    with world.join(ParallelPlan()) as here:

        def loss(options: TrainingOptions, steps: int) -> float:
            """Mean loss on the rows held back, or the training loss if that is no longer finite."""
            nonlocal done
            training = trainer.build(spec, train, options, here, job.seed)
            for _ in range(min(steps, training.steps)):
                training.train_step()
            result = training.losses()[-1]
            if math.isfinite(result):
                (module,) = training.parallel.parts  # of one process: the whole model
                result = evaluation.evaluate(module, spec, held_back, here.device).loss
            done += 1
            report(stage="tune", step=done, steps=trainings, loss=result if math.isfinite(result) else None)
            return result

        table = halve(drawn, plan, loss)
    jobs.write_result(job.out, {"table": [row(tried) for tried in table], "best": row(winner(table))})


def rounds(candidates: int, rows: int, eta: int) -> list[Round]:
    """Rounds until fewer than `eta` candidates are left; the first has all candidates with `rows` each.

    Round i has n / eta^i candidates, rounded down, with rows · eta^i each, so none takes longer than the first.
    """
    schedule = [Round(candidates, rows)]
    while schedule[-1].candidates >= eta:
        schedule.append(Round(schedule[-1].candidates // eta, schedule[-1].rows * eta))
    return schedule


def draw(
    settings: TuneOptions, base: TrainingOptions, rows: int, rng: np.random.Generator
) -> list[TrainingOptions]:
    """Candidates for a training set of so many rows; the first is `base`."""
    lr = settings.lr_least or base.lr / 30, settings.lr_most or base.lr * 30
    sizes = settings.batch_least or base.batch_size, settings.batch_most or base.batch_size
    drawn = [base]
    while len(drawn) < settings.candidates:
        batch = round(_log_uniform(*sizes, rng))
        options = replace(
            base,
            lr=_log_uniform(*lr, rng),
            batch_size=batch,
            # the same total of rows
            steps=max(1, round(base.steps * base.batch_size / batch)) if base.steps else 0,
        )
        most = settings.warmup_most or options.steps_of(-(-rows // batch)) // 10
        drawn.append(replace(options, warmup=round(_log_uniform(1, max(1, most), rng))))
    return drawn


def halve(
    candidates: Sequence[TrainingOptions],
    plan: Sequence[Round],
    loss: Callable[[TrainingOptions, int], float],
) -> list[Tried]:
    """Results of every training of every round; `loss` trains for so many steps and returns the loss."""
    table: list[Tried] = []
    staying = list(range(len(candidates)))
    for number, each in enumerate(plan):
        tried = []
        for candidate in staying[: each.candidates]:
            options = candidates[candidate]
            steps = max(1, each.rows // options.batch_size)
            steps = min(steps, options.steps or steps)
            tried.append(Tried(number, candidate, options, steps, loss(options, steps)))
        table += tried
        staying = [one.candidate for one in sorted(tried, key=_loss)]
    return table


def winner(table: Sequence[Tried]) -> Tried:
    """The best of the last round."""
    return min((tried for tried in table if tried.round == table[-1].round), key=_loss)


def _loss(tried: Tried) -> float:
    return tried.loss if math.isfinite(tried.loss) else math.inf


def split(source: Source, held_back: int, job: jobs.JobFile) -> tuple[Source, Source]:
    """The rows candidates train on and those they are evaluated on, drawn from the job's seed.

    Raises:
        JobError: no rows would be left to train on.
    """
    judged = validation_rows(held_back, len(source))
    if judged >= len(source):
        raise jobs.JobError(
            f"{job.path}: tune.held_back is {judged}, expected fewer than the {len(source)} rows of the training set"
        )
    rows = held_out.draw(len(source), judged, np.random.default_rng([job.seed, 2]))
    return held_out.Rest(source, rows), held_out.Part(source, rows)


def row(tried: Tried) -> dict[str, Any]:
    """A result as JSON."""
    options = asdict(tried.options)
    return {
        "round": tried.round,
        "candidate": tried.candidate,
        **{name: options[name] for name in TUNED},
        "steps": tried.steps,
        "loss": tried.loss if math.isfinite(tried.loss) else None,
    }


def _log_uniform(least: float, most: float, rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(math.log(least), math.log(most)))) if least < most else float(least)


if __name__ == "__main__":
    process.serve(tune)
