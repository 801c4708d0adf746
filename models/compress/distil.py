"""Distillation: a student learns a teacher's probabilities along with the labels.

Hinton, Vinyals, Dean 2015, "Distilling the knowledge in a neural network", section 2: both softmaxes at
temperature T, the soft term multiplied by T^2 so that its gradients keep their size when T changes.

Run as `python -P -m models.compress.distil JOB.json`: `model` is the student, `teacher` is
`{"model": …, "params": "teacher.safetensors"}`, arrays are `x_train`, `y_train`, `x_test`, `y_test` and,
where there are unlabelled rows for the teacher to label, `x_extra`. Writes `model.safetensors` and
`result.json`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from edge_client import process
from models import job as jobs
from models.labels import PADDING
from models.options import bounded
from models.pretrain import evaluation, params
from models.pretrain.data.batches import Arrays, global_batches, shifted
from models.zoo.spec import Loss, masked_cross_entropy

CPU = torch.device("cpu")

OnEpoch = Callable[[int, float], None]


@dataclass(frozen=True)
class Options:
    """How to distil.

    Attributes:
        temperature: T of both softmaxes.
        alpha: weight of the soft term; 1 - alpha that of the labels. 0 is plain training.
        shift: images are moved by up to this many pixels, for teacher and student alike.
    """

    epochs: int = bounded(30, 1, 100_000)
    batch_size: int = bounded(16, 1, 1_000_000)
    lr: float = bounded(2e-3, 0.0, 1e3)
    weight_decay: float = bounded(0.01, 0.0, 1e3)
    temperature: float = bounded(3.0, 0.01, 1e3)
    alpha: float = bounded(0.7, 0.0, 1.0)
    shift: int = bounded(0, 0, 64)


@dataclass(frozen=True)
class Distilled:
    """A trained student, in evaluation mode, and the loss of every step."""

    student: nn.Module
    losses: list[float]


def distil(
    teacher: nn.Module,
    student: nn.Module,
    x: npt.NDArray[Any],
    y: npt.NDArray[np.int32],
    options: Options,
    rng: np.random.Generator,
    *,
    loss: Loss = masked_cross_entropy,
    on_epoch: OnEpoch = lambda epoch, loss: None,
) -> Distilled:
    """Trains a copy of `student` on what `teacher` says about `x` and on `y`; neither module is changed.

    Args:
        y: int32 [N] or [N, T]; a row of nothing but `PADDING` is unlabelled and has only the soft term.
        loss: the student's own, mean per counted label.
    """
    learner = copy.deepcopy(student).train()
    guide = copy.deepcopy(teacher).eval()
    optimizer = torch.optim.AdamW(learner.parameters(), options.lr, weight_decay=options.weight_decay)
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))  # dropout, where the student has it
        for epoch in range(1, options.epochs + 1):
            before = len(losses)
            for batch in global_batches(len(x), options.batch_size, rng):
                x_batch, y_batch = (
                    torch.from_numpy(shifted(x[batch], options.shift, rng)),
                    torch.from_numpy(y[batch]),
                )
                with torch.no_grad():
                    taught = guide(x_batch)
                total = distillation_loss(learner(x_batch), taught, y_batch, options, loss)
                optimizer.zero_grad()
                total.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(float(total.detach()))
            on_epoch(epoch, float(np.mean(losses[before:])))
    return Distilled(learner.eval(), losses)


def distillation_loss(
    logits: torch.Tensor,
    taught: torch.Tensor,
    y: torch.Tensor,
    options: Options,
    loss: Loss = masked_cross_entropy,
) -> torch.Tensor:
    """alpha · T² · KL(teacher ‖ student at T) + (1 - alpha) · loss, over logits [B, (T,) C].

    The soft term is the mean over labels that count, and over every place of unlabelled rows.
    """
    unlabelled = (y == PADDING).flatten(1).all(1) if y.ndim > 1 else y == PADDING
    heeded = (y != PADDING) | unlabelled.reshape(-1, *[1] * (y.ndim - 1))
    wanted = F.log_softmax(taught / options.temperature, -1)
    said = F.log_softmax(logits / options.temperature, -1)
    divergence = F.kl_div(said, wanted, reduction="none", log_target=True).sum(-1)
    soft = (divergence * heeded).sum() / heeded.sum() * options.temperature**2
    if not (y != PADDING).any():
        return options.alpha * soft
    return options.alpha * soft + (1 - options.alpha) * loss(logits, y)


def run(path: Path, report: process.Report) -> None:
    """The whole job, from its file."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    job = jobs.read(path)
    spec, teacher_spec, options = job.spec(), job.spec("teacher", "model"), job.options(Options)
    x, x_test = job.rows("x_train", spec), job.rows("x_test", spec)
    y, y_test = job.labels("y_train", spec, x), job.labels("y_test", spec, x_test)
    if options.shift:
        evaluation.require_images(x, f"options.shift is {options.shift}", path)
    if (teacher_spec.input_shape, teacher_spec.classes) != (spec.input_shape, spec.classes):
        raise jobs.JobError(
            f"{path}: the teacher takes {teacher_spec.input_shape} to {teacher_spec.classes} classes, "
            f"the student {spec.input_shape} to {spec.classes}; they must agree"
        )
    if job.has_array("x_extra"):
        extra = job.rows("x_extra", spec)
        x = np.concatenate([x, extra])
        y = np.concatenate([y, np.full((len(extra), *y.shape[1:]), PADDING, np.int32)])
    teacher = teacher_spec.build(job.seed)
    params.load(teacher, job.file("teacher.params", job.value("teacher", "params")))

    report(stage="distil", epoch=0, epochs=options.epochs)
    distilled = distil(
        teacher,
        spec.build(job.seed),
        x,
        y,
        options,
        np.random.default_rng(job.seed),
        loss=spec.loss,
        on_epoch=lambda epoch, loss: report(stage="distil", epoch=epoch, epochs=options.epochs, loss=loss),
    )
    figures = evaluation.evaluate(distilled.student, spec, Arrays(x_test, y_test), CPU)
    taught = evaluation.evaluate(teacher, teacher_spec, Arrays(x_test, y_test), CPU)
    saved = params.save(distilled.student, job.out / "model.safetensors")
    about = {
        "teacher_accuracy": taught["test_accuracy"],
        "teacher_parameters": sum(parameter.numel() for parameter in teacher.parameters()),
    }
    seconds = time.perf_counter() - started
    jobs.write_result(job.out, {**figures, **saved, **about, "seconds": seconds, "losses": distilled.losses})


if __name__ == "__main__":
    process.serve(run)
