"""What compression costs and brings, on MNIST-10k and on phrasebank.

    FEDLOOP_DATA_DIR=… python -m tests.bench --only compression

`resnet8(norm = "batch")` and a `cnn` of 61 thousand params, trained here and by a federation, in all precisions; a student of the first,
distilled and from scratch; quantization-aware training; pruning; and a text classifier in dynamic int8. Accuracies are of the
files on LiteRT; latencies are of one row, one thread with XNNPACK, medians of runs taken in turns. Prints the table, writes
`runs/bench/compression.png`, and names in `failures` whatever was not as it should be. `FEDLOOP_BENCH_SHORT=1` trains on a
quarter of the rows: quick to look at, and no proof.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedloop
from models import datasets, zoo
from models.compress import (
    amx,
    distil,
    pipeline,
    report,
)
from models.compress.pruning.structure import rebuild
from models.compress.quantization import (
    qat,
    quantize,
    recipes,
)
from models.compress.step import Context, Data, Precision, StepModel
from models.compress.tuning import Tuning, own_loss, tune
from models.pretrain.data.batches import Arrays
from models.zoo.spec import ModelSpec
from tests.bench.compression_recipes import SPARSE_MNIST

PRECISIONS: tuple[Precision, ...] = ("float16", "weight-int8", "dynamic-int8", "static-int8", "int4")
SEED, LENGTH, VOCAB = 7, 48, 2048
RESNET8 = {"norm": "batch"}
STUDENT = {"channels": [4, 8]}
CNN = {"hidden": 19}
TEACHING = (
    Tuning(epochs=5, batch_size=64, lr=3e-3, shift=1),
    Tuning(epochs=2, batch_size=64, lr=3e-4, shift=1),
)
STUDYING = Tuning(epochs=8, batch_size=32, lr=3e-3, shift=1)
LEARNING = Tuning(epochs=8, batch_size=32, lr=3e-3)
STUDENT_ROWS, SEEDS = 1000, (0, 1, 2)
"""Students that are compared have few rows, so that there is something left for a teacher to tell."""
ONE_SIDED_95 = 1.645
PLOT = Path("runs/bench/compression.png")


@dataclass
class _Table:
    """Files by name, what they are worth, and what was promised of them."""

    files: dict[str, bytes] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)
    latency_us: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    test_rows: int = 0

    def add(self, name: str, tflite: bytes, data: Data) -> None:
        self.files[name] = tflite
        self.test_rows = len(data.y_test)
        self.accuracy[name] = report.quality(tflite, data.x_test, data.y_test)

    def promise(self, kept: bool, what: str) -> None:
        sys.stdout.write(f"{'holds' if kept else 'FAILS'}: {what}\n")
        if not kept:
            self.failures.append(what)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "bytes": len(content),
                "accuracy": self.accuracy[name],
                "latency_us": self.latency_us[name],
            }
            for name, content in self.files.items()
        ]

    def print_rows(self) -> None:
        for row in self.rows():
            sys.stdout.write(
                f"{row['name']:34} {row['bytes'] / 1e3:8.1f} KB  {row['latency_us']:7.1f} us  {row['accuracy']:.4f}\n"
            )


def run() -> dict[str, Any]:
    """Prints and returns the figures; `failures` has everything that was promised and does not hold."""
    folder = os.environ.get("FEDLOOP_DATA_DIR")
    wanted = ("mnist10k-images-idx3-ubyte.gz", "financial_phrasebank.csv")
    if not folder or not all((Path(folder) / name).is_file() for name in wanted):
        sys.stdout.write(f"compression: {' or '.join(wanted)} is not in FEDLOOP_DATA_DIR: left out\n")
        return {"skipped": "no data"}
    torch.set_num_threads(1)
    amx.disable()  # those of a server say nothing of devices
    short = os.environ.get("FEDLOOP_BENCH_SHORT") == "1"
    images, text = _Table(), _Table()
    _images(images, Path(folder), short)
    report.plot(images.rows(), PLOT, images.test_rows)
    sys.stdout.write(f"Pareto plot: {PLOT}{' (a quarter of the rows: no proof)' if short else ''}\n")
    _text(text, Path(folder), short)
    failures = [] if short else images.failures + text.failures
    return {"short": short, "images": images.rows(), "text": text.rows(), "failures": failures}


def _images(table: _Table, folder: Path, short: bool) -> None:
    data = _data("mnist", folder, short)
    teacher = _timed("teacher", lambda: _trained(_spec("resnet8", RESNET8), data, SEED, *TEACHING))
    federated = _timed("federation", lambda: _federated(folder, short))
    central = _timed("cnn", lambda: _trained(_spec("cnn", CNN), data, SEED, *TEACHING))
    originals = {"resnet8": teacher, "cnn": central, "cnn, federated": federated}
    for name, model in originals.items():
        _precisions(table, name, model, data)
    student = _timed("student", lambda: _taught(teacher, data, SEED, STUDYING, 0.9))
    _precisions(table, "student", student, data, ("static-int8",))
    students, scratch = _timed("students", lambda: _students(teacher, data))
    aware = _timed("qat", lambda: qat.train(teacher, data, QAT, Context(SEED, teacher)))
    table.add("resnet8 qat", _file(aware), data)
    sparse = _timed("sparsity", lambda: _sparse(teacher, data))
    _precisions(table, "resnet8 sparse", sparse, data, ("static-int8",))
    table.latency_us.update(report.latency(table.files, data.x_test, turns=100))
    table.print_rows()

    for name in originals:
        _static_holds(table, name)
    accuracy, bytes_ = table.accuracy, {name: len(content) for name, content in table.files.items()}
    ratio, gap = (
        bytes_["resnet8 float32"] / bytes_["student static-int8"],
        accuracy["resnet8 float32"] - accuracy["student static-int8"],
    )
    table.promise(
        ratio >= 10 and gap <= 0.02,
        f"student {ratio:.1f} times smaller, {100 * gap:.2f} points below its teacher",
    )
    won_rows, lost_rows = _disagreements(table.files["resnet8 qat"], table.files["resnet8 static-int8"], data)
    table.promise(
        lost_rows - won_rows <= ONE_SIDED_95 * math.sqrt(won_rows + lost_rows),
        f"qat no worse than static int8 without training: of {len(data.y_test)} rows {won_rows} won, {lost_rows} lost (McNemar)",
    )
    share = 1 - report.nonzero(sparse.module) / report.parameters(teacher.module)
    lost = accuracy["resnet8 float32"] - accuracy["resnet8 sparse float32"]
    table.promise(
        share >= 0.75 and lost <= 0.01,
        f"{100 * share:.0f} % of the params gone or zero, {100 * lost:.2f} points lost",
    )
    taught, alone = (
        [report.quality(m.module, data.x_test, data.y_test) for m in models] for models in (students, scratch)
    )
    won = sum(a > b for a, b in zip(taught, alone, strict=True))
    table.promise(
        float(np.mean(taught)) > float(np.mean(alone)),
        f"distilled {np.mean(taught):.4f}, from scratch {np.mean(alone):.4f}, better with {won} of {len(SEEDS)} seeds",
    )


def _disagreements(one: bytes, other: bytes, data: Data) -> tuple[int, int]:
    """Rows that only `one` gets right, and rows that only `other` does."""
    right, theirs = (report.logits(each, data.x_test).argmax(-1) == data.y_test for each in (one, other))
    return int((right & ~theirs).sum()), int((theirs & ~right).sum())


def _text(table: _Table, folder: Path, short: bool) -> None:
    data = _data("phrasebank", folder, short, length=LENGTH, vocab=VOCAB)
    spec = zoo.get("textcls", input_shape=(LENGTH,), classes=3, vocab=VOCAB, width=64)
    model = _timed("text", lambda: _trained(spec, data, SEED, Tuning(epochs=5, batch_size=32, lr=1e-3)))
    _precisions(table, "textcls", model, data, ("dynamic-int8",))
    table.latency_us.update(report.latency(table.files, data.x_test, turns=100))
    table.print_rows()
    smaller, faster, lost = _against_float(table, "textcls", "dynamic-int8")
    table.promise(
        smaller >= 2.7 and faster > 1 and lost <= 0.01,
        f"textcls dynamic int8 {smaller:.2f} times smaller, {faster:.2f} times faster, {100 * lost:.2f} points lost",
    )


QAT = qat.QATOptions(epochs=2, batch_size=64, lr=5e-4, shift=1, distil=True, max_accuracy_drop=1.0)


def _static_holds(table: _Table, name: str) -> None:
    smaller, faster, lost = _against_float(table, name, "static-int8")
    table.promise(
        smaller >= 3 and faster >= 1.7 and lost <= 0.005,
        f"{name} static int8 {smaller:.2f} times smaller, {faster:.2f} times faster, {100 * lost:.2f} points lost",
    )


def _against_float(table: _Table, name: str, precision: Precision) -> tuple[float, float, float]:
    """How many times smaller and faster than float32, and how much accuracy it costs."""
    float32, other = f"{name} float32", f"{name} {precision}"
    return (
        len(table.files[float32]) / len(table.files[other]),
        table.latency_us[float32] / table.latency_us[other],
        table.accuracy[float32] - table.accuracy[other],
    )


def _precisions(
    table: _Table, name: str, model: StepModel, data: Data, precisions: tuple[Precision, ...] = PRECISIONS
) -> None:
    float32, _ = quantize.convert_checked(model, data.x_test)
    table.add(f"{name} float32", float32, data)
    ranges = recipes.calibrate(float32, data.x_train[:256])
    for precision in precisions:
        table.add(f"{name} {precision}", recipes.quantize(float32, precision, ranges), data)


def _students(teacher: StepModel, data: Data) -> tuple[list[StepModel], list[StepModel]]:
    """Distilled ones and ones from scratch, from the same weights on the same rows in the same order, by seed."""
    some = replace(data, x_train=data.x_train[:STUDENT_ROWS], y_train=data.y_train[:STUDENT_ROWS])
    taught = [_taught(teacher, some, seed, LEARNING, 0.9) for seed in SEEDS]
    return taught, [_taught(teacher, some, seed, LEARNING, 0.0) for seed in SEEDS]


def _taught(teacher: StepModel, data: Data, seed: int, tuning: Tuning, alpha: float) -> StepModel:
    """A student of `teacher`, or with `alpha` 0 of the labels alone."""
    spec, rng = _spec("cnn", STUDENT), np.random.default_rng(seed)
    options = distil.DistilOptions(**_fields(tuning), temperature=4.0, alpha=alpha)
    x, y = data.x_train, data.y_train
    return StepModel(
        spec, distil.distil([teacher.module], spec.build(seed), x, y, options, rng, loss=spec.loss)[0]
    )


def _sparse(teacher: StepModel, data: Data) -> StepModel:
    with tempfile.TemporaryDirectory() as folder:
        steps = pipeline.plan_steps(SPARSE_MNIST, "compression bench")
        return pipeline.run(steps, teacher, data, Path(folder), SEED)[-1].model


def _federated(folder: Path, short: bool) -> StepModel:
    """What a federation of ten made of a cnn, from scratch."""
    experiment = {
        "seed": SEED,
        "data": {"dataset": "mnist", "partition": "iid"},
        "model": {"name": "cnn", **CNN},
        "federation": {
            "clients": 10,
            "clients_per_round": 10,
            "rounds": 2 if short else 8,
            "runtimes": {"torch": 1.0},
        },
        "local": {"epochs": 2, "batch_size": 32, "lr": 0.1},
        "simulation": {"workers": 1},
    }
    with tempfile.TemporaryDirectory() as scratch:
        result = fedloop.simulate(experiment, out=Path(scratch) / "run", data_dir=folder)
    spec = _spec("cnn", CNN)
    return StepModel(spec, rebuild(spec, dict(result.params)))


def _trained(spec: ModelSpec, data: Data, seed: int, *tunings: Tuning) -> StepModel:
    module = spec.build(seed)
    if len(spec.input_shape) > 1:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rows = Arrays(data.x_train, data.y_train)
    for tuning in tunings:
        tune(module, rows, tuning, np.random.default_rng(seed), own_loss(spec))
    return StepModel(spec, module.to(memory_format=torch.contiguous_format))  # type: ignore[call-overload]


def _data(name: str, folder: Path, short: bool, **options: Any) -> Data:
    loaded = datasets.load(name, data_dir=folder, seed=SEED, **options)
    train, test = (np.flatnonzero(rows) for rows in (~loaded.test, loaded.test))
    # rows of a file may be sorted by class
    train = np.random.default_rng(SEED).permutation(train)[: len(train) // 4 if short else None]
    return Data(loaded.x[train], loaded.y[train], loaded.x[test], loaded.y[test])


def _spec(name: str, options: Mapping[str, Any]) -> ModelSpec:
    return zoo.get(name, input_shape=(28, 28), classes=10, **options)


def _file(model: StepModel) -> bytes:
    assert model.tflite is not None
    return model.tflite


def _fields(tuning: Tuning) -> dict[str, Any]:
    return {"epochs": tuning.epochs, "batch_size": tuning.batch_size, "lr": tuning.lr, "shift": tuning.shift}


def _timed(what: str, work: Any) -> Any:
    began = time.perf_counter()
    done = work()
    sys.stdout.write(f"{what}: {time.perf_counter() - began:.0f} s\n")
    sys.stdout.flush()
    return done
