"""The exported files do what torch does, int8 is int8 in the file itself, and a bad export is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from coordinator import jobs
from models import zoo
from models.compress import quantize
from models.compress.quantize import ExportRefused
from models.pretrain import evaluation, params
from models.pretrain.training import Options
from tests.support.training import trained

CPU = torch.device("cpu")
MODEL = {"name": "cnn", "input_shape": [8, 8], "classes": 10}


@dataclass(frozen=True)
class Exported:
    """A digits classifier, exported."""

    job: jobs.Job
    folder: Path
    result: dict[str, Any]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    digits = load_digits()
    x, y = (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)
    arrays = {"x_train": x[:300], "y_train": y[:300], "x_test": x[-300:], "y_test": y[-300:]}
    spec = zoo.get("cnn", input_shape=(8, 8), classes=10)
    module, _ = trained(spec, x[:300], y[:300], Options(epochs=20, lr=2e-3))
    folder = tmp_path_factory.mktemp("quantize")
    params.save(module, folder / "student.safetensors")
    job = jobs.Job("quantize", MODEL, arrays, params=folder / "student.safetensors")
    return Exported(job, folder, jobs.run(job, folder))


@pytest.mark.slow
def test_float32_gives_torchs_logits(exported: Exported) -> None:
    spec = zoo.get("cnn", input_shape=(8, 8), classes=10)
    module = spec.build(1)
    params.load(module, exported.folder / "student.safetensors")
    x, y = exported.job.arrays["x_test"], exported.job.arrays["y_test"]
    measured = quantize.measure(exported.folder / "model_fp32.tflite", x, y)
    expected = evaluation.logits_of(module, x, CPU).numpy()
    np.testing.assert_allclose(measured.logits, expected, atol=1e-4 * np.abs(expected).max())
    assert exported.result["fp32"]["accuracy"] == pytest.approx(
        float((expected.argmax(1) == y).mean()), abs=1 / len(y)
    )
    assert exported.result["fp32"]["max_abs_error"] <= 1e-4 * np.abs(expected).max()
    assert exported.result["fp32"]["accuracy"] > 0.8


@pytest.mark.slow
def test_int8_is_int8_everywhere_in_the_file(exported: Exported) -> None:
    tensors = quantize.stored_tensors(exported.folder / "model_int8.tflite")
    assert {tensor.dtype for tensor in tensors} == {"int8", "int32"}  # int32: biases, shapes, paddings
    weights = sorted(tensor.size for tensor in tensors if tensor.constant and tensor.dtype == "int8")
    assert weights == sorted([8 * 9, 16 * 8 * 9, 10 * 256])
    figures = exported.result["int8"]
    assert (figures["float_tensors"], figures["int8_weight_share"]) == (0, 1.0)
    assert (figures["input"], figures["output"]) == ("int8", "int8")
    assert exported.result["fp32"]["input"] == "float32"


@pytest.mark.slow
def test_int8_is_smaller_and_nearly_as_accurate(exported: Exported) -> None:
    fp32, int8 = exported.result["fp32"], exported.result["int8"]
    assert int8["bytes"] == (exported.folder / "model_int8.tflite").stat().st_size
    assert int8["bytes"] < 0.6 * fp32["bytes"]
    assert int8["accuracy"] >= fp32["accuracy"] - 0.02
    assert exported.result["agreement"] > 0.95


@pytest.mark.slow
def test_a_text_models_embedding_table_becomes_int8_too(tmp_path: Path) -> None:
    model = {
        "name": "textcls",
        "input_shape": [8],
        "classes": 3,
        "input_dtype": "int32",
        "options": {"layers": 1},
    }
    spec = zoo.get("textcls", input_shape=(8,), classes=3, layers=1)
    params.save(spec.build(0), tmp_path / "model.safetensors")
    x = np.random.default_rng(0).integers(1, 50, size=(30, 8)).astype(np.int32)
    y = evaluation.logits_of(spec.build(0), x, CPU).argmax(1).int().numpy()
    arrays = {"x_train": x, "x_test": x, "y_test": y}
    job = jobs.Job(
        "quantize", model, arrays, {"max_accuracy_drop": 0.2}, params=tmp_path / "model.safetensors"
    )
    result = jobs.run(job, tmp_path)
    assert result["fp32"]["accuracy"] == 1.0  # torch's own answers
    assert result["int8"]["int8_weight_share"] == 1.0
    assert result["int8"]["input"] == "int32"
    tensors = quantize.stored_tensors(tmp_path / "model_int8.tflite")
    vocabulary = spec.build(0).get_parameter("embedding.weight").shape
    assert [tensor.dtype for tensor in tensors if tensor.shape == tuple(vocabulary)] == ["int8"]


@pytest.mark.slow
def test_a_float32_file_is_not_taken_for_int8(exported: Exported) -> None:
    with pytest.raises(ExportRefused, match=r"only 0% of the weight values became int8"):
        quantize.require_integers(exported.folder / "model_fp32.tflite")


@pytest.mark.slow
def test_calibration_on_other_rows_costs_accuracy_and_is_refused(exported: Exported, tmp_path: Path) -> None:
    """Ranges from images a hundred times too dark: everything saturates."""
    arrays: Mapping[str, np.ndarray] = {
        **exported.job.arrays,
        "x_train": exported.job.arrays["x_train"] / 100,
    }
    with pytest.raises(
        jobs.JobFailed, match=r"int8 accuracy is .* points below float32 .* allowed are 2.0; calibrate"
    ):
        jobs.run(replace(exported.job, arrays=arrays), tmp_path)
    assert not [
        path.name for path in tmp_path.iterdir() if "tflite" in path.name or path.name == "result.json"
    ]


def test_the_gate_is_a_bound_and_not_a_comparison() -> None:
    quantize.require_accuracy(0.90, 0.88, 0.02)
    quantize.require_accuracy(0.90, 0.95, 0.0)
    with pytest.raises(ExportRefused, match=r"2\.5 points"):
        quantize.require_accuracy(0.90, 0.875, 0.02)


@pytest.mark.parametrize("error", [1e-2, float("nan")])
def test_logits_that_differ_from_torch_are_refused(error: float) -> None:
    expected = np.ones((2, 3), np.float32)
    assert quantize.require_same_logits(expected + np.float32(1e-6), expected) < 1e-5
    with pytest.raises(ExportRefused, match="differs from torch"):
        quantize.require_same_logits(expected + np.float32(error), expected)
