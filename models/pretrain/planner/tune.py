"""`python -P -m models.pretrain.planner.tune JOB.json`: looks for a learning rate, warm-up and batch size.

    draw candidates -> train each on few rows -> keep the best third -> train these on three times as many -> … -> best

Successive halving (Jamieson and Talwalkar 2016, figure 3; its bracket in Li 2018, Algorithm 1): as many rows go into every
round, shared by ever fewer candidates. Rows rather than steps, so that large batches are not trained more than small
ones. Every training begins anew from the job's seed, and follows its schedule as if it went on to the last step.
Candidates are judged by rows of the training set that none of them trains on; the test set is not looked at.

Beside what `models.pretrain.worker` reads the job may have `tune`, a table of `Settings`. Writes `result.json`:

    {"table": [{"round", "candidate", "lr", "warmup", "batch_size", "steps", "loss"}, …],
     "best": {"candidate", "lr", "warmup", "batch_size", "steps", "loss"}}

Candidate 0 is what the job's options say. A loss that is not finite is written as null and is the worst of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_client import process
from models import job as jobs
from models.options import bounded
from models.pretrain import evaluation, initial, params, trainer, world
from models.pretrain.data import sources
from models.pretrain.data.batches import Chance, Indices, Rows, Source
from models.pretrain.plan import ParallelPlan
from models.pretrain.training import Options
from models.zoo import ModelSpec

TUNED = ("lr", "warmup", "batch_size")


@dataclass(frozen=True)
class Settings:
    """What to look through. Everything is drawn log-uniformly between its bounds.

    Attributes:
        candidates: trained in the first round.
        steps: that each is trained in it, of the job's batch size; later rounds more.
        eta: one of so many goes on to the next round.
        lr_least, lr_most: 0: a thirtieth of the job's, thirty times it.
        warmup_most: steps; 0: a tenth of the training's.
        batch_least, batch_most: rows; 0: the job's.
        held_back: rows of the training set that candidates are judged by; 0: a tenth of it, at most 1024.
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
    """How many candidates train on how many rows each."""

    candidates: int
    rows: int


@dataclass(frozen=True)
class Tried:
    """One candidate in one round."""

    round: int
    candidate: int
    options: Options
    steps: int
    loss: float


def tune(path: Path, report: process.Report) -> None:
    """The whole job."""
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, given = job.spec(), job.options(Options)
    settings = job.table("tune", Settings) or Settings()
    train, judge = split(sources.of(job, spec, given.shift).train, settings.held_back, job)
    spec = initial.starting(job, spec)
    drawn = draw(settings, given, len(train), np.random.default_rng([job.seed, 1]))
    plan = rounds(settings.candidates, settings.steps * given.batch_size, settings.eta)
    trainings, done = sum(each.candidates for each in plan), 0

    with world.join(ParallelPlan()) as here:

        def loss(options: Options, steps: int) -> float:
            nonlocal done
            found = train_and_judge(spec, train, judge, options, steps, here, job.seed)
            done += 1
            report(stage="tune", step=done, steps=trainings, loss=found if math.isfinite(found) else None)
            return found

        table = halve(drawn, plan, loss)
    jobs.write_result(job.out, {"table": [row(tried) for tried in table], "best": row(winner(table))})


def rounds(candidates: int, rows: int, eta: int) -> list[Round]:
    """Rounds down to fewer than `eta` candidates, the first of all of them with `rows` each.

    Round i has n / eta^i candidates, rounded down, and rows · eta^i for each, so that none takes more than the first.
    """
    found = [Round(candidates, rows)]
    while found[-1].candidates >= eta:
        found.append(Round(found[-1].candidates // eta, found[-1].rows * eta))
    return found


def draw(settings: Settings, given: Options, rows: int, rng: np.random.Generator) -> list[Options]:
    """Candidates for a training set of so many rows, the first what is given."""
    lr = settings.lr_least or given.lr / 30, settings.lr_most or given.lr * 30
    sizes = settings.batch_least or given.batch_size, settings.batch_most or given.batch_size
    drawn = [given]
    while len(drawn) < settings.candidates:
        batch = round(_log_uniform(*sizes, rng))
        options = replace(
            given,
            lr=_log_uniform(*lr, rng),
            batch_size=batch,
            # the same rows in all
            steps=max(1, round(given.steps * given.batch_size / batch)) if given.steps else 0,
        )
        most = settings.warmup_most or options.steps_of(-(-rows // batch)) // 10
        drawn.append(replace(options, warmup=round(_log_uniform(1, max(1, most), rng))))
    return drawn


def halve(
    candidates: Sequence[Options], plan: Sequence[Round], loss: Callable[[Options, int], float]
) -> list[Tried]:
    """Every training of every round; `loss` is that after so many steps."""
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


def train_and_judge(
    spec: ModelSpec,
    train: Source,
    judge: Source,
    options: Options,
    steps: int,
    here: world.World,
    seed: int,
) -> float:
    """Mean loss on `judge` after `steps` steps of a training, or what it was when it stopped being finite."""
    training = trainer.build(spec, train, options, here, seed)
    for _ in range(min(steps, training.steps)):
        training.train_step()
    last = training.losses()[-1]
    if not math.isfinite(last):
        return last
    whole = params.gather(training.parallel.parts, spec, here)
    assert whole is not None
    return evaluation.evaluate(whole.to(here.device), spec, judge, here.device)["test_loss"]


@dataclass(frozen=True)
class Part:
    """Some rows of a source."""

    source: Source
    rows: Indices

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Indices, chance: Chance) -> Rows:
        return self.source.read(self.rows[rows], chance)

    def counted(self, rows: Indices) -> int:
        return self.source.counted(self.rows[rows])


def split(source: Source, held_back: int, job: jobs.Job) -> tuple[Source, Source]:
    """What candidates train on, and what they are judged by, drawn from the job's seed.

    Raises:
        JobError: as many rows are to be held back as there are.
    """
    judged = held_back or max(1, min(1024, len(source) // 10))
    if judged >= len(source):
        raise jobs.JobError(
            f"{job.path}: tune.held_back is {judged}, expected fewer than the {len(source)} rows of the training set"
        )
    order = np.random.default_rng([job.seed, 2]).permutation(len(source))
    return Part(source, np.sort(order[judged:])), Part(source, np.sort(order[:judged]))


def row(tried: Tried) -> dict[str, Any]:
    """As JSON has it."""
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
