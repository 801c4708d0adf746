"""Sentiment of financial news by a BERT: pretrained by hiding words, then fine-tuned by 1 and by 4 processes.

    FEDLOOP_DATA_DIR=… python -m tests.bench --only sentiment

Prints test accuracy, seconds of a step, and what of them is communication: `in` exchanges, which mostly run beside
the backward pass, and `exposed`, from the last gradient's being ready to the end of the backward pass, unpacking
included, when nothing else is done; so with a single bucket it is the longer of the two. Both are measured in process 0 by a hook of DistributedDataParallel.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from models import datasets, zoo
from models.pretrain import evaluation, initial, params, trainer, world
from models.pretrain.data.batches import Arrays
from models.pretrain.data.tokens import Masked
from models.pretrain.plan import ParallelPlan
from models.pretrain.training import TrainingOptions
from models.zoo import ModelSpec
from tests.support import ranks
from tests.support.whole_model import whole

LENGTH, VOCAB, CLASSES, SEED = 48, 2048, 3, 7
SIZES = {"vocab": VOCAB, "width": 64, "layers": 2, "heads": 4}
PRETRAINING = TrainingOptions(steps=300, batch_size=64, lr=1e-3, warmup=30, decay="linear", clip_norm=1.0)
FINE_TUNING = TrainingOptions(epochs=4, batch_size=32, lr=1e-3, warmup=30, decay="linear", clip_norm=1.0)
WORKERS = 4


def run() -> dict[str, Any]:
    """Prints and returns the figures of both.

    Raises:
        AssertionError: 1 and 4 processes differ by more than one row of the test set.
    """
    folder = os.environ.get("FEDLOOP_DATA_DIR")
    if not folder or not (Path(folder) / "financial_phrasebank.csv").is_file():
        sys.stdout.write("sentiment: financial_phrasebank.csv is not in FEDLOOP_DATA_DIR: left out\n")
        return {"skipped": "no data"}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "model.safetensors"
        hiding = ranks.run(1, "tests.bench.sentiment:pretrain", folder, checkpoint)[0]
        sys.stdout.write(f"hidden words: loss {hiding[0]:.2f} -> {hiding[1]:.2f}\n")
        alone = ranks.run(1, "tests.bench.sentiment:fine_tune", folder, checkpoint)[0]
        together = ranks.run(WORKERS, "tests.bench.sentiment:fine_tune", folder, checkpoint)[0]
    for name, found in (("1 process", alone), (f"{WORKERS} processes", together)):
        sys.stdout.write(
            f"{name:12} accuracy {found['accuracy']:.4f}  loss {found['loss']:.5f}  step {found['step_ms']:.1f} ms  "
            f"communication {found['in']:.1%} of it, exposed {found['exposed']:.1%}  all {found['seconds']:.1f} s\n"
        )
    sys.stdout.write(
        f"{WORKERS} processes share {os.cpu_count()} cores here: their seconds say nothing of {WORKERS} machines\n"
    )
    rows = abs(alone["accuracy"] - together["accuracy"]) * alone["rows"]
    assert rows <= 1 + 1e-6, f"1 and {WORKERS} processes differ by {rows:.0f} rows of {alone['rows']}"
    return {"1": alone, str(WORKERS): together, "masked_loss": {"first": hiding[0], "last": hiding[1]}}


def pretrain(folder: str, checkpoint: Path) -> tuple[float, float]:
    """The mean loss of the first and last 20 steps; params go to `checkpoint`. The labels are not looked at."""
    train, _ = _data(folder)
    spec = zoo.get("bert", input_shape=(LENGTH,), classes=VOCAB, objective="masked", **SIZES)
    losses: list[float] = []
    with world.join(ParallelPlan()) as here:
        training = trainer.build(spec, Masked(train, VOCAB), PRETRAINING, here, SEED)
        trainer.train(training, lambda progress: losses.extend(progress.losses), every=50)
        params.save(training.parallel.parts[0], checkpoint)
    return statistics.mean(losses[:20]), statistics.mean(losses[-20:])


def fine_tune(folder: str, checkpoint: Path) -> dict[str, float] | None:
    """What process 0 found; None in the others."""
    train, test = _data(folder)
    spec = _from(checkpoint)
    with world.join(ParallelPlan(dp=int(os.environ["WORLD_SIZE"]))) as here:
        training = trainer.build(spec, train, FINE_TUNING, here, SEED)
        clock = _Clock()
        module = training.parallel.parts[0]
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(clock, _timed)
        steps: list[float] = []
        inside, exposed = [], []
        began = time.perf_counter()
        backward = training.run

        def run(batch: Any) -> torch.Tensor:
            clock.spans.clear()
            loss = backward(batch)
            clock.returned = time.perf_counter()
            return loss

        training.run = run
        while training.step < training.steps:
            at = time.perf_counter()
            training.train_step()
            steps.append(time.perf_counter() - at)
            inside.append(_union(clock.spans))
            exposed.append(clock.returned - clock.spans[-1][0] if clock.spans else 0.0)
        seconds = time.perf_counter() - began
        full = whole(training.parallel.parts, spec, here)
        if full is None:
            return None
        scores = evaluation.evaluate(full, spec, test, torch.device("cpu"))
    step = statistics.median(steps)
    return {
        "accuracy": scores.accuracy,
        "loss": scores.loss,
        "rows": len(test),
        "step_ms": 1e3 * step,
        "in": statistics.median(inside) / step,
        "exposed": statistics.median(exposed) / step,
        "seconds": seconds,
    }


@dataclasses.dataclass
class _Clock:
    """When every bucket's sum of one step began and ended."""

    spans: list[list[float]] = dataclasses.field(default_factory=list)
    returned: float = 0.0


def _timed(clock: _Clock, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The usual mean over processes, with a look at the clock before and after."""
    span = [time.perf_counter(), 0.0]
    clock.spans.append(span)
    tensor = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(tensor, async_op=True).get_future()

    def done(summed: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        span[1] = time.perf_counter()
        return summed.value()[0]

    return future.then(done)


# torch compares the annotations themselves, which are text here
_timed.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def _union(spans: list[list[float]]) -> float:
    """Seconds in which at least one of `spans` was under way."""
    total, until = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _from(checkpoint: Path) -> ModelSpec:
    """A classifier whose fresh modules begin with the pretrained params."""
    spec = zoo.get("bert", input_shape=(LENGTH,), classes=CLASSES, **SIZES)
    return initial.with_params(spec, checkpoint, new_head=True)


def _data(folder: str) -> tuple[Arrays, Arrays]:
    loaded = datasets.load("phrasebank", data_dir=Path(folder), seed=SEED, length=LENGTH, vocab=VOCAB)
    train, test = (np.flatnonzero(rows) for rows in (~loaded.test, loaded.test))
    return Arrays(loaded.x[train], loaded.y[train]), Arrays(loaded.x[test], loaded.y[test])
