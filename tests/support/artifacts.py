"""Artifacts for tests: every model is converted once, and kept between test runs and between workers.

The cache is named by the source of what converts, so a change there never meets an artifact of before it.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.examples import Examples
from edge_client.wire import manifest
from edge_client.wire.manifest import Manifest
from models import zoo
from models.conversion.request import ExportRequest, export
from models.conversion.request_cache import Exported
from models.zoo.spec import ModelSpec
from strategies.params import Params

ROOT = Path(__file__).parents[2]
BATCH = 8

ARCHITECTURES: dict[str, ExportRequest] = {
    "logreg": ExportRequest("logreg", {}, (12,), 5, batch_size=BATCH),
    "mlp": ExportRequest("mlp", {"hidden": [16, 8]}, (12,), 5, batch_size=BATCH),
    "cnn": ExportRequest("cnn", {}, (8, 8), 10, batch_size=BATCH),
    "resnet8-group": ExportRequest("resnet8", {"width": 8}, (2, 9, 9), 10, batch_size=BATCH),
    "resnet8-batch": ExportRequest("resnet8", {"width": 8, "norm": "batch"}, (8, 8), 10, batch_size=BATCH),
    "charlm": ExportRequest(
        "charlm", {"width": 16, "layers": 1}, (16,), 30, "int32", "next_token", batch_size=BATCH
    ),
    "mlp-quantity": ExportRequest("mlp", {"hidden": [16]}, (12,), 1, task="regression", batch_size=BATCH),
    "textcls": ExportRequest("textcls", {"vocab": 50, "layers": 1}, (12,), 3, "int32", batch_size=BATCH),
}
"""Small, odd sizes, so that a mix-up of axes shows."""


@functools.cache
def exported(name: str) -> tuple[Exported, Manifest]:
    """The artifact of one of `ARCHITECTURES` and its manifest."""
    found = export(ARCHITECTURES[name], cache_dir(), code_folder=ROOT)
    return found, manifest.from_json(found.manifest.read_bytes(), str(found.manifest))


def spec_of(request: ExportRequest) -> ModelSpec:
    task = "regression" if request.task == "regression" else "classification"  # other models know their own
    return zoo.get(
        request.model, input_shape=request.input_shape, classes=request.classes, task=task, **request.options
    )


def cache_dir() -> Path:
    digest = hashlib.sha256()
    sources = [*(ROOT / "models/conversion").glob("*.py"), ROOT / "edge_client/wire/manifest.py"]
    for path in sorted([*sources, ROOT / "edge_client/train/golden.py"]):
        digest.update(path.read_bytes())
    return ROOT / ".pytest_cache" / "artifacts" / digest.hexdigest()[:16]


def local_examples(spec: ModelSpec, count: int, *, seed: int) -> Examples:
    """Examples a model of this kind takes; token rows end at a random length and are 0 from there on."""
    rng = np.random.default_rng(seed)
    label_shape = (count, *spec.input_shape) if spec.task == "next_token" else (count,)
    y: Any = rng.integers(0, spec.classes, label_shape).astype(np.int32)
    if spec.task == "regression":
        y = rng.normal(size=count).astype(np.float32)
    if spec.input_dtype == "float32":
        return Examples(rng.standard_normal((count, *spec.input_shape)).astype(np.float32), y)
    x = rng.integers(0, spec.tokens, (count, *spec.input_shape)).astype(np.int32)
    if spec.task == "classification":
        lengths = rng.integers(1, spec.input_shape[0] + 1, (count, 1))
        x[np.arange(spec.input_shape[0]) >= lengths] = 0
    return Examples(x, y)


def lived_in(params: Params, *, seed: int) -> Params:
    """Params as after some training: nothing is all zeros or ones, variances stay positive. Read-only."""
    rng = np.random.default_rng(seed)
    moved: dict[str, Any] = {}
    for name, value in params.items():
        noise = rng.normal(0, 0.05, value.shape).astype(np.float32)
        moved[name] = (
            value * np.float32(rng.uniform(0.5, 2)) if name.endswith("running_var") else value + noise
        )
        moved[name].flags.writeable = False
    return moved
