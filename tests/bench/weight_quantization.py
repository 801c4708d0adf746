"""GPTQ against rounding to nearest: how many next tokens change, perplexity, sizes, and the time of packed layers.

    FEDLOOP_DATA_DIR=… python -m tests.bench --only weight_quantization

Pretrains a `gpt` and a `charlm` on Shakespeare's plays for some minutes. The tokens are those of greedy decoding at every position of held-out
rows, compared with the float model's.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from models import datasets, zoo
from models.compress import report
from models.compress.quantization import packed, weight_only
from models.compress.quantization.weight_only import GPTQOptions
from models.compress.step import Context, Data, StepModel
from models.compress.tuning import Tuning, own_loss, tune
from models.datasets.dataset import Dataset
from models.pretrain.data.batches import Arrays
from models.zoo.spec import ModelSpec

LENGTH, SEED, TEST_ROWS = 64, 7, 512
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"width": 256, "layers": 2, "heads": 4},
    "charlm": {"width": 64, "layers": 2, "heads": 4},
}
TRAINING = Tuning(epochs=2, batch_size=32, lr=2e-3)
VARIANTS = {"int4, groups of 128": (4, 128), "int4, whole rows": (4, 0), "int8, whole rows": (8, 0)}
MOST_CHANGED, LEAST_SMALLER = 0.6, {4: 6.0, 8: 3.5}


def run() -> dict[str, Any]:
    """Prints and returns the figures of each model.

    Raises:
        AssertionError: GPTQ changes more than `MOST_CHANGED` of the tokens that rounding changes, or a model is too large.
    """
    folder = os.environ.get("FEDLOOP_DATA_DIR")
    if not folder or not (Path(folder) / "tinyshakespeare.txt").is_file():
        sys.stdout.write("weight_quantization: tinyshakespeare.txt is not in FEDLOOP_DATA_DIR: left out\n")
        return {"skipped": "no data"}
    torch.set_num_threads(1)
    plays = datasets.load("shakespeare", data_dir=Path(folder), length=LENGTH)
    return {name: _compare(plays, name, options) for name, options in MODELS.items()}


def _compare(plays: Dataset, name: str, options: dict[str, Any]) -> dict[str, Any]:
    model, data = _pretrained(plays, name, options)
    logits = report.logits(model.module, data.x_test)
    sys.stdout.write(f"{name} {options}: perplexity {_perplexity(model.spec, logits, data):.4f}\n")
    found: dict[str, Any] = {}
    for title, (bits, group) in VARIANTS.items():
        changed: dict[str, float] = {}
        for method in ("nearest", "gptq"):
            row, made = _quantized(model, data, GPTQOptions(bits, group, method, max_accuracy_drop=1.0))  # type: ignore[arg-type]
            answers = report.logits(made.module, data.x_test)
            counted = data.y_test >= 0
            changed[method] = float((answers.argmax(-1) != logits.argmax(-1))[counted].mean())
            row |= {"changed": changed[method], "perplexity": _perplexity(model.spec, answers, data)}
            found[f"{title}, {method}"] = row
            sys.stdout.write(
                f"  {title:20} {method:8} changed {changed[method]:.3%}  perplexity {row['perplexity']:.4f}  matrices "
                f"{row['times_smaller']:.2f} times smaller  {row['bytes']:,} bytes  {row['cpu_seconds']:.1f} CPU-s\n"
            )
            assert row["times_smaller"] >= LEAST_SMALLER[bits], f"{name}, {title}: {row['times_smaller']:.2f}"
        ratio = changed["gptq"] / changed["nearest"]
        sys.stdout.write(f"  {title:20} gptq changes {ratio:.2f} of the tokens that nearest changes\n")
        if bits == 4:
            assert ratio <= MOST_CHANGED, f"{name}, {title}: gptq changes {ratio:.2f} of what nearest changes"
        found[f"{title}, times"] = _times(made, data)
    return found


def _pretrained(plays: Dataset, name: str, options: dict[str, Any]) -> tuple[StepModel, Data]:
    spec = zoo.get(name, input_shape=(LENGTH,), classes=plays.classes, input_dtype="int32", task="next_token", **options)  # fmt: skip
    module, rng = spec.build(SEED), np.random.default_rng(SEED)
    x, y = (np.asarray(each, np.int32) for each in (plays.x, plays.y))
    learnt = np.flatnonzero(~plays.test)
    held_out = rng.permutation(np.flatnonzero(plays.test))[:TEST_ROWS]
    tune(module, Arrays(x[learnt], y[learnt]), TRAINING, rng, own_loss(spec))
    return StepModel(spec, module), Data(x[learnt], y[learnt], x[held_out], y[held_out])


def _quantized(model: StepModel, data: Data, options: GPTQOptions) -> tuple[dict[str, Any], StepModel]:
    began = time.process_time()
    made = weight_only.step(model, data, options, Context(SEED, model))
    assert made.packed is not None
    return {
        "times_smaller": made.facts["times_smaller"],
        "bytes": len(made.packed),
        "cpu_seconds": time.process_time() - began,
    }, made


def _perplexity(spec: ModelSpec, logits: Any, data: Data) -> float:
    return math.exp(float(spec.loss(torch.from_numpy(logits), torch.from_numpy(data.y_test))))


def _times(made: StepModel, data: Data) -> dict[str, float]:
    """CPU time of the packed model, in units of the float model's, for a row and for 16 together."""
    assert made.packed is not None
    small = packed.load(made.packed, made.spec, "packed.safetensors")
    times = {}
    for rows in (1, 16):
        x = torch.from_numpy(data.x_test[:rows])
        seconds = {"float": math.inf, "packed": math.inf}
        for _ in range(10):
            for kind, module in (("float", made.module), ("packed", small)):
                seconds[kind] = min(
                    seconds[kind], _cpu_seconds(lambda module=module, x=x: _forward(module, x))
                )
        times[f"{rows} rows"] = seconds["packed"] / seconds["float"]
        sys.stdout.write(f"  {'':20} packed takes {times[f'{rows} rows']:.2f} times the CPU of float, {rows} rows of {LENGTH}\n")  # fmt: skip
    return times


def _forward(module: nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode():
        module(x)


def _cpu_seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    for _ in range(3):
        work()
    return time.process_time() - began
